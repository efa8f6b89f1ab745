"""The planted bugs of mutations.py, and the test that must catch each."""

from typing import Literal, NamedTuple

Suite = Literal["test", "test-kernels"]


class Mutation(NamedTuple):
    """One bug, and a test that must catch it.

    Args:
        name: what the mutated code does wrong.
        path: the changed file, relative to the package.
        old, new: the text before and after.
        suite: the make target whose environment the test needs; "test-kernels" sets TRITON_INTERPRET=1.
        test: pytest node id, relative to tests/.
        count: how often `old` must occur; every occurrence is replaced.
    """

    name: str
    path: str
    old: str
    new: str
    suite: Suite
    test: str
    count: int = 1


KERNELS = "backends/triton/kernels"
HOPPER = f"{KERNELS}/hopper"
ELEMENT = "backends/test_triton_element.py::test_each_spec_conforms_with_and_without_segments"
PORTABLE_TEST = "backends/test_triton.py::test_each_spec_conforms_with_two_launch_configs"
HOPPER_TEST = "backends/test_hopper_numbers.py::test_every_kernel_matches_float64_for_every_spec"
DECODE_TEST = "backends/test_triton.py::test_decode_in_slots_equals_the_whole_sequence"
FUSED_TEST = "backends/test_fused_step.py::test_kernel_matches_the_reference_step"
CONV_TEST = "backends/test_short_conv.py::test_kernels_match_conv1d"
EQUATION = "::test_mixer_equals_its_equation"

PORTABLE_KERNELS = [
    Mutation(
        "prepare: the cumulative decay is summed in float32", f"{KERNELS}/prepare.py",
        "tl.cumsum(log2_decay.to(tl.float64), 0)", "tl.cumsum(log2_decay, 0)", "test-kernels",
        "backends/test_triton.py::test_a_run_of_strong_decays_does_not_change_later_tokens[gated delta--50.0-32]",
    ),
    Mutation(
        "prepare: an early erase reads the state after the decay", f"{KERNELS}/prepare.py",
        "G_erase = G_before if ERASE_EARLY else G", "G_erase = G",
        "test-kernels", f"{PORTABLE_TEST}[comba-one segment-grouped]",
    ),
    Mutation(
        "prepare: the triangular inverse stops one level too early", f"{KERNELS}/prepare.py",
        "if 2**level < C:", "if 2 ** (level + 1) < C:", "test-kernels", f"{PORTABLE_TEST}[delta-one segment-pack]",
    ),
    Mutation(
        "scan: the state does not decay between chunks", f"{KERNELS}/scan.py",
        "Sa *= tl.exp2(G_end)", "Sa *= 1.0", "test-kernels", f"{PORTABLE_TEST}[gated delta-one segment-grouped]",
    ),
    Mutation(
        "scan: the recomputation starts at the window instead of the checkpoint before it", f"{KERNELS}/scan.py",
        "first // CHECKPOINT_EVERY * CHECKPOINT_EVERY, first)", "first, first)",
        "test-kernels", "backends/test_triton.py::test_a_window_may_start_between_checkpoints[(341,)-1]",
    ),
    Mutation(
        "scan: the low half of the state is left out of the erase", f"{KERNELS}/scan.py",
        "(Sa - S_a.to(tl.float32)).to(dtype)", "tl.zeros_like(S_a)",
        "test-kernels", "backends/test_triton.py::test_splitting_the_feedback_in_two_terms_reduces_the_error",
    ),
    Mutation(
        "reverse: the erase adds to the state's gradient", f"{KERNELS}/reverse.py",
        "dx * -load_gate", "dx * load_gate", "test-kernels", f"{PORTABLE_TEST}[gated delta-one segment-grouped]",
    ),
    Mutation(
        "gradients: the gradient of the decay leaves out the state", f"{KERNELS}/gradients.py",
        "tl.cumsum(dG, 0, reverse=True) + state_product", "tl.cumsum(dG, 0, reverse=True)",
        "test-kernels", f"{PORTABLE_TEST}[gated delta-one segment-grouped]",
    ),
    Mutation(
        "gradients: only the first value head of a group adds to the keys' gradient", f"{KERNELS}/gradients.py",
        "for g in range(GROUP):", "for g in range(1):",
        "test-kernels", f"{PORTABLE_TEST}[gated delta-one segment-grouped]",
    ),
    Mutation(
        "gradients: the gradient of beta is divided by a beta of zero", f"{KERNELS}/gradients.py",
        "db_i = b_db / clamped_b", "db_i = b_db / b_i",
        "test-kernels", "backends/test_triton.py::test_gradients_are_accurate_where_beta_is_zero[gated delta]",
    ),
    Mutation(
        "combine: the maps of segments are not transposed in the backward", f"{KERNELS}/combine.py",
        "load_map(M_p, ka, ka, in_ka, in_ka, K, REVERSE)", "load_map(M_p, ka, ka, in_ka, in_ka, K, False)",
        "test-kernels", f"{PORTABLE_TEST}[gated delta-segments-many chunks]",
    ),
    Mutation(
        "zero_tail: the last row beyond the last sequence is not zeroed", f"{KERNELS}/zero_tail.py",
        "end = last * WIDTH", "end = (last - 1) * WIDTH",
        "test-kernels", "backends/test_triton.py::test_rows_after_the_last_sequence_are_zero[gated delta]",
    ),
    Mutation(
        "micro-step: only an additive update decays the state", f"{KERNELS}/decode/micro_step.py",
        "if DECAYS:", "if DECAYS and not DELTA:", "test-kernels", f"{DECODE_TEST}[gated delta]",
    ),
    Mutation(
        "decode step: every Householder step decays the state", f"{KERNELS}/decode/token.py",
        "DECAYS and m == 0", "DECAYS", "test-kernels", f"{DECODE_TEST}[householders, before]",
    ),
    Mutation(
        "decode step: the slot behind the pool is read and written", f"{KERNELS}/decode/token.py",
        "in_pool = (slot >= 0) & (slot < pool_rows)", "in_pool = (slot >= 0) & (slot <= pool_rows)", "test-kernels",
        "backends/test_triton.py::test_decode_with_a_slot_outside_the_pool_accesses_no_state[gated delta]",
    ),
    Mutation(
        "fused step: the history of the convolution is not shifted", f"{KERNELS}/decode/fused_step.py",
        "taps[i + 1].to(", "taps[i].to(", "test-kernels", f"{FUSED_TEST}[gated delta-none]",
    ),
    Mutation(
        "fused step: the feedback weakens the write, too", f"{KERNELS}/decode/fused_step.py",
        "writes = writes + (strength * traits.WRITE_FACTOR,)", "writes = writes + (erase * traits.WRITE_FACTOR,)",
        "test-kernels", f"{FUSED_TEST}[comba-all]",
    ),
    Mutation(
        "decode: the erase has the write strength", f"{KERNELS}/decode/token.py",
        "tl.load(erase + step * HV + hv)", "tl.load(write + step * HV + hv)",
        "test-kernels", f"{DECODE_TEST}[comba]",
    ),
    Mutation(
        "fused step: the skip connection is scaled like the output", f"{KERNELS}/decode/fused_step.py",
        "tl.load(skip + hv).to(tl.float32) * v", "tl.load(skip + hv).to(tl.float32) * v * scale",
        "test-kernels", f"{FUSED_TEST}[mamba2-all]",
    ),
    Mutation(
        "short convolution: the taps are applied in the wrong order", f"{KERNELS}/conv/short_conv.py",
        "weight + channel * W + (W - 1 - j)", "weight + channel * W + j",
        "test-kernels", f"{CONV_TEST}[short-torch.float32]",
    ),
    Mutation(
        "short convolution: a sequence of a pack reads the one before it", f"{KERNELS}/conv/short_conv.py",
        "x_j = tl.where((row < 0)[:, None], past, x_j)", "x_j += 0.0 * past",
        "test-kernels", f"{CONV_TEST}[short pack with history-torch.float32]",
    ),
    Mutation(
        "short convolution, backward: the derivative of SiLU lacks a term", f"{KERNELS}/conv/short_conv.py",
        "d *= gate + s - s * gate", "d *= gate + s", "test-kernels", f"{CONV_TEST}[short-torch.float32]",
    ),
    Mutation(
        "short convolution, backward: a gradient crosses the start of a sequence", f"{KERNELS}/conv/short_conv.py",
        "later = clear_at_start(later, is_first, W)", "later = later",
        "test-kernels", f"{CONV_TEST}[short pack with history-torch.float32]",
    ),
    Mutation(
        "element backward: adds up the sums of the wrong interval", f"{KERNELS}/element/backward.py",
        "pending += (1 - interval % 2) * SCRATCH", "pending += interval % 2 * SCRATCH", "test-kernels",
        f"{ELEMENT}[rate, after-one segment-shared keys]",
    ),
    Mutation(
        "element backward: a token at the end misses the one before it", f"{KERNELS}/element/backward.py",
        "for earlier in range(stop, t):", "for earlier in range(stop, t - 1):", "test-kernels",
        f"{ELEMENT}[rate, after-segments-keys per channel]",
    ),
    Mutation(
        "element backward: each group starts from the checkpoint", f"{KERNELS}/element/backward.py",
        "S = tl.where(group == j, states[j], S)", "S = tl.where(group == j, states[0], S)", "test-kernels",
        f"{ELEMENT}[rate, after-one segment-shared keys]",
    ),
    Mutation(
        "element backward: lanes keep the tile that they send", f"{KERNELS}/element/tile.py",
        "sent = tl.where(is_first, xs[2 * i + 1], xs[2 * i])", "sent = tl.where(is_first, xs[2 * i], xs[2 * i + 1])",
        "test-kernels", f"{ELEMENT}[rate, after-one segment-shared keys]",
    ),
    Mutation(
        "replay: a recording ignores the sizes of its arguments", "backends/triton/replay.py",
        "key += (x.dtype, x.shape)", "key.append(x.dtype)",
        "test", "backends/test_replay.py::test_calls_with_other_dtypes_sizes_or_traits_are_recorded_anew",
    ),
    Mutation(
        "replay: a view starts where its buffer does", "backends/triton/replay.py",
        "return pointers[self.buffer] + self.offset", "return pointers[self.buffer]",
        "test", "backends/test_replay.py::test_repeated_call_allocates_again_and_passes_views_and_numbers",
    ),
]  # fmt: skip

HOPPER_KERNELS = [
    Mutation(
        "Hopper prepare: the erase matrix lacks the decay", f"{HOPPER}/prepare.py",
        "L = A * D * (-erase_row)", "L = A * (-erase_row)",
        "test-kernels", f"{HOPPER_TEST}[prepare-gated delta-ordinary-True]",
    ),
    Mutation(
        "Hopper scan: the scale enters the exponent of the decay", f"{HOPPER}/scan.py",
        "gl.exp2(G_read) * scale", "gl.exp2(G_read * scale)",
        "test-kernels", f"{HOPPER_TEST}[scans-mamba2-ordinary-False]",
    ),
    Mutation(
        "Hopper scan: the consumer does not wait for the values", f"{HOPPER}/scan.py",
        "mbarrier.wait(smem.v_full.index(stage), phase)", "pass",
        "test-kernels", f"{HOPPER_TEST}[scans-linear-decays-True]",
    ),
    Mutation(
        "Hopper reverse: the state's gradient reaches the values without decay", f"{HOPPER}/reverse.py",
        "dx *= gl.exp2(G_end - G)[None, :]", "dx *= 1.0",
        "test-kernels", f"{HOPPER_TEST}[one tile of keys-gated delta-ordinary-True]",
    ),
    Mutation(
        "Hopper sweep: the keys' gradient is scaled by the wrong decay", f"{HOPPER}/sweep_consumer.py",
        "gl.exp2(smem.G.index(stage).slice(63, 1).load(ACC_TK_ROWS) - G)", "gl.exp2(G)",
        "test-kernels", f"{HOPPER_TEST}[sweep-both before-ordinary-False]",
    ),
]  # fmt: skip

LAUNCHES = [
    Mutation(
        "launch: the fake operator has a wrong number of checkpoint slots", "backends/triton/op.py",
        "s.checkpoint_slots(every)", "s.checkpoint_slots(every + 1)",
        "test-kernels", "backends/test_triton.py::test_operators_pass_opcheck",
    ),
    Mutation(
        "launch: the windows of the backward run from the first to the last", "backends/triton/backward.py",
        "for window in reversed(range(windows)):", "for window in range(windows):",
        "test-kernels", "backends/test_triton.py::test_gradients_do_not_depend_on_the_number_of_windows[()-1]",
    ),
    Mutation(
        "plan: the fused backward is chosen for grouped heads", "backends/triton/plan.py",
        "values=range(33, 129), grouped=False)", "values=range(33, 129))", "test",
        "backends/test_plan.py::test_plan_follows_from_problem_and_device[change1-device1-hopper-hopper-sweep]",
    ),
]  # fmt: skip

COMPILE_BACKEND = [
    Mutation(
        "compile: a sequence of a pack continues the state of the one before", "backends/compile/chunk_scan_forward.py",
        "torch.where(start[0], start[1], before, out=before)", "pass",
        "test", "backends/test_chunk_scan.py::test_values_and_gradients_match_the_equations[1-delta-True-2]",
    ),
    Mutation(
        "compile: the gradient of the state stops between two segments of a sequence",
        "backends/compile/chunk_scan_backward.py",
        "bounds is None or bounds[i] or i == 0", "bounds is None or bounds[i]",
        "test", "backends/test_chunk_scan.py::test_values_and_gradients_match_the_equations[1-delta-True-2]",
    ),
    Mutation(
        "compile: an early erase reads the state after the decay", "backends/compile/intra_chunk_scalar.py",
        'g_k - decay if spec.erase_from == "previous" else g_k', "g_k",
        "test", f"mixers/test_equations_delta.py{EQUATION}[chunked-comba]",
    ),
    Mutation(
        "compile: a read before the update sees the update", "backends/compile/element_scan.py",
        "_read(history[:-1] if read_before else history[1:], q[n], o[n])", "_read(history[1:], q[n], o[n])",
        "test", "backends/test_element_scan.py::test_element_scan_matches_the_reference[rows-head-before-1]",
    ),
]  # fmt: skip

MIXERS = [
    Mutation(
        "beta: the sigmoid is left out", "mixers/parts/beta.py",
        "raw.to(state_dtype(raw.dtype)).sigmoid()", "raw.to(state_dtype(raw.dtype))",
        "test", f"mixers/test_equations_delta.py{EQUATION}[reference-deltanet]",
    ),
    Mutation(
        "Comba: the feedback weakens the write, too", "mixers/parts/feedback.py",
        "erase=erase, write=beta)", "erase=erase, write=erase)",
        "test", f"mixers/test_equations_delta.py{EQUATION}[reference-comba]",
    ),
    Mutation(
        "Comba: the norm of the erase key has the epsilon of the key", "mixers/parts/feedback.py",
        "(factor.square() * square + EPS)", "(factor.square() * (square + EPS))",
        "test", f"mixers/test_equations_delta.py{EQUATION}[reference-comba, norm after the feedback]",
    ),
    Mutation(
        "decay: dt_bias is ignored", "mixers/parts/decays.py",
        "raw.to(dtype) + dt_bias.to(dtype)", "raw.to(dtype)",
        "test", f"mixers/test_equations_delta.py{EQUATION}[reference-gated_deltanet, doubled erase]",
    ),
    Mutation(
        "rotary: queries and keys rotate the other way", "mixers/parts/rotary.py",
        "angle = position[..., None] *", "angle = -position[..., None] *",
        "test", f"mixers/test_equations_additive.py{EQUATION}[reference-retnet]",
    ),
    Mutation(
        "convolution: the state of a padded row ends one token too early", "mixers/parts/convolution.py",
        "torch.arange(-past, 0,", "torch.arange(-past - 1, -1,",
        "test", "mixers/test_states.py::test_padded_rows_equal_unpadded_rows[gated_deltanet-reference-right]",
    ),
    Mutation(
        "convolution: the state keeps the oldest tokens", "mixers/parts/convolution.py",
        "torch.cat([before, recent], 1)[:, recent.shape[1] :]", "torch.cat([before, recent], 1)[:, :past]", "test",
        "mixers/test_states.py::test_pieces_give_the_output_and_state_of_one_call[mamba2-reference-grad-[2, 1, 0, 6]]",
    ),
    Mutation(
        "padding: the mask is not applied to the decay", "mixers/core/delta_mixer.py",
        'changed["log_decay"] = masked(per_token)', 'changed["log_decay"] = per_token',
        "test", "mixers/test_states.py::test_padded_rows_equal_unpadded_rows[mamba2-reference-right]",
    ),
    Mutation(
        "output gate: a sigmoid instead of SiLU", "mixers/parts/output_gates.py",
        "gate = F.silu(gate)", "gate = gate.sigmoid()",
        "test", f"mixers/test_equations_delta.py{EQUATION}[reference-gated_deltanet, doubled erase]",
    ),
    Mutation(
        "RWKV-7: the token shift mixes in the current token instead of the previous one", "mixers/parts/rwkv7.py",
        "x + (previous - x) * mix", "previous + (x - previous) * mix",
        "test", f"mixers/test_equations_delta.py{EQUATION}[reference-rwkv7]",
    ),
    Mutation(
        "MLA: decoding reads the cached latent vectors without the map to values", "mixers/mla.py",
        "weight_HEC[:, self.K :])", "weight_HEC[:, : self.V])",
        "test", "mixers/test_matrix.py::test_mixer_has_property[mla-decode]",
    ),
    Mutation(
        "FoX: padded tokens forget", "mixers/parts/forget_gates.py",
        "torch.where(context.mask[..., None], log_f, 0.0)", "log_f",
        "test", "mixers/test_states.py::test_padded_rows_equal_unpadded_rows[fox-reference-both]",
    ),
    Mutation(
        "PaTH: decoding does not multiply the cached keys", "mixers/path_attention.py",
        'state | {"k": write_back(state["k"], past)}', "state", "test",
        "mixers/test_matrix.py::test_mixer_has_property[path_attention-decode]",
    ),
    Mutation(
        "PaTH: the gradient of the keys misses the later chunks", "mixers/parts/householder_attention.py",
        "d_k = d_k + d_own", "pass", "test",
        "mixers/test_equations_attention.py::test_householder_attention_over_many_chunks_equals_the_equation",
    ),
    Mutation(
        "preconditioner: the erase key is preconditioned, too", "mixers/parts/preconditioner.py",
        "erase_key=inputs.k)", "erase_key=(k * factor).to(inputs.k.dtype))",
        "test", f"mixers/test_equations_delta.py{EQUATION}[reference-preconditioned_kda]",
    ),
    Mutation(
        "Mamba-3: the previous token's write does not decay", "mixers/parts/mamba3.py",
        "beta = inputs.log_decay.exp() * (", "beta = (",
        "test", f"mixers/test_equations_additive.py{EQUATION}[reference-mamba3]",
    ),
    Mutation(
        "log-linear attention: the tree of a piece starts at its first token", "mixers/parts/log_linear.py",
        'before + state["seen"][:, None]', "before",
        "test", "mixers/test_log_linear.py::test_pieces_that_start_inside_chunks_equal_one_call[gdn-[64, 64, 22]]",
    ),
    Mutation(
        "log-linear attention: the last level passes its tokens on", "mixers/parts/log_linear.py",
        "torch.where(carried_L == last, last, level(t, bucket))", "level(t, bucket)",
        "test", "mixers/test_log_linear.py::test_mixer_equals_its_definition[gdn, two levels]",
    ),
    Mutation(
        "MoM: the weights of the chosen memories do not add up to one", "mixers/mom.py",
        "if self.active > 1:", "if self.active > len(self.weight):",
        "test", "mixers/test_mom.py::test_mixture_of_any_mixer_equals_a_loop_over_tokens[deltanet]",
    ),
    Mutation(
        "short convolution: every group has the weights of the first", f"{KERNELS}/conv/short_conv.py",
        "channel += group * traits.C", "channel += 0", "test-kernels", f"{CONV_TEST}[groups-torch.float32]",
    ),
    Mutation(
        "short convolution, backward: tokens before a group add to its gradient", f"{KERNELS}/conv/short_conv.py",
        "(i - u >= low) & (i - u < high)", "(i - u >= 0) & (i - u < high)",
        "test-kernels", f"{CONV_TEST}[groups in one strip-torch.float32]",
    ),
    Mutation(
        "MoM: the convolution reads the tokens of another memory", "backends/grouped_conv.py",
        "inside_A = position_A >= shift", "inside_A = row_A >= shift",
        "test", "mixers/test_mom.py::test_mixture_of_any_mixer_equals_a_loop_over_tokens[deltanet]",
    ),
    Mutation(
        "load balance: only the first layer counts", "mixers/parts/routing.py",
        "statistics_L2E.mean(0)", "statistics_L2E[0]",
        "test", "blocks/test_losses.py::test_losses_equal_their_definitions_over_all_layers[8-None]",
    ),
    Mutation(
        "MoE: the weights of the active experts do not add up to one", "blocks/moe.py",
        "if config.normalize:", "if not config.normalize:",
        "test", "blocks/test_moe.py::test_equals_the_published_block[qwen3_next]",
    ),
]  # fmt: skip

BLOCKS = [
    Mutation(
        "loss: the target is the token itself", "blocks/training/text.py", "window[:, 1:]", "window[:, :-1]",
        "test", "blocks/test_text.py::test_targets_are_the_inputs_shifted_by_one_byte",
    ),
    Mutation(
        "loss: ignored targets count in the mean", "backends/cross_entropy.py",
        "(targets_N != ignore_index).sum()", "torch.tensor(targets_N.numel())",
        "test", "backends/test_cross_entropy.py::test_equals_its_definition_in_value_and_gradient[4-mean-None-None]",
    ),
    Mutation(
        "loss: the gradient ignores the cap of the logits", "backends/cross_entropy.py",
        "p_RL *= slope(z_RL)", "pass",
        "test", "backends/test_cross_entropy.py::test_equals_its_definition_in_value_and_gradient[4-mean-None-1.5]",
    ),
    Mutation(
        "loss: the backward ignores the scale of the loss", "backends/cross_entropy.py",
        "torch.mul(gradient, factor.reshape(1), out=out)", "out.copy_(gradient)",
        "test", "backends/test_cross_entropy.py::test_tied_weights_and_accumulated_gradients_add_up",
    ),
    Mutation(
        "layer: the residual connection of DeepNorm passes by the norm", "blocks/layer.py",
        "self.residual_scale * normed_BTD", "self.residual_scale * x_BTD",
        "test", "blocks/test_hybrids.py::test_logits_and_gradients_equal_those_of_transformers[MiniMax]",
    ),
    Mutation(
        "layer: shared layers have separate weights", "blocks/spec.py", "if spec.share in shared:", "if False:",
        "test", "blocks/test_layer.py::test_shared_layers_have_one_set_of_weights_and_a_state_for_each_place",
    ),
    Mutation(
        "checkpoint: the step is not restored", "blocks/training/train.py", 'self.step = saved["step"]', "pass",
        "test", "blocks/test_train.py::test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit",
    ),
    Mutation(
        "checkpoint: the random generator is not restored", "blocks/training/train.py",
        'torch.set_rng_state(saved["rng"])', "pass",
        "test", "blocks/test_train.py::test_resume_restores_the_random_generator",
    ),
    Mutation(
        "sampling: the temperature multiplies the logits", "blocks/generation/sampling.py",
        "keepdim=True)) / temperature", "keepdim=True)) * temperature",
        "test", "blocks/test_generate.py::test_top_k_and_top_p_equal_a_direct_computation[None-None-0.5]",
    ),
]  # fmt: skip

MUTATIONS = [*PORTABLE_KERNELS, *HOPPER_KERNELS, *LAUNCHES, *COMPILE_BACKEND, *MIXERS, *BLOCKS]
