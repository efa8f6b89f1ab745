"""Planted bugs of the kernels and of their launches, and the test that must catch each."""

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


TRITON = "backends/triton"
PORTABLE = f"{TRITON}/chunk/kernels/portable"
HOPPER = f"{TRITON}/chunk/kernels/sm90"
CONV_KERNELS = f"{TRITON}/conv/kernels/short_conv.py"
ELEMENT = "backends/test_triton_element.py::test_each_spec_conforms_with_and_without_segments"
PORTABLE_TEST = "backends/test_triton.py::test_each_spec_conforms_with_two_launch_configs"
ERASE_KEY_TEST = "backends/test_hopper_numbers.py::test_erase_keys_that_differ_from_k"
HOPPER_TEST = "backends/test_hopper_numbers.py::test_every_kernel_matches_float64_for_every_spec"
DECODE_TEST = "backends/test_triton.py::test_decode_in_slots_equals_the_whole_sequence"
FUSED_TEST = "backends/test_fused_step.py::test_kernel_matches_the_reference_step"
CONV_TEST = "backends/test_short_conv.py::test_kernels_match_conv1d"

PORTABLE_KERNELS = [
    Mutation(
        "prepare: the cumulative decay is summed in float32", f"{PORTABLE}/prepare.py",
        "tl.cumsum(log2_decay.to(tl.float64), 0)", "tl.cumsum(log2_decay, 0)", "test-kernels",
        "backends/test_triton.py::test_a_run_of_strong_decays_does_not_change_later_tokens[gated delta--50.0-32]",
    ),
    Mutation(
        "prepare: an erase from the previous state reads the state after the decay", f"{PORTABLE}/prepare.py",
        "G_erase = G_before if traits.ERASE_PREVIOUS else G", "G_erase = G",
        "test-kernels", f"{PORTABLE_TEST}[comba-one segment-odd widths]",
    ),
    Mutation(
        "prepare: the triangular inverse stops one level too early", f"{PORTABLE}/prepare.py",
        "if 2**level < C:", "if 2 ** (level + 1) < C:", "test-kernels", f"{PORTABLE_TEST}[delta-one segment-pack]",
    ),
    Mutation(
        "scan: the state does not decay between chunks", f"{PORTABLE}/scan.py",
        "S = scaled(S, tl.exp2(G_end), NK)", "S = scaled(S, 1.0, NK)",
        "test-kernels", f"{PORTABLE_TEST}[gated delta-one segment-grouped]",
    ),
    Mutation(
        "segments: the slots of two sequences overlap", f"{TRITON}/device/layout.py",
        "return first_scratch_slot // SEGMENT_CHUNKS + n + segment",
        "return first_scratch_slot // SEGMENT_CHUNKS + segment",
        "test-kernels", "backends/test_triton.py::test_each_kernel_conforms[gated delta, segments]",
    ),
    Mutation(
        "scan: the recomputation starts at the window instead of the checkpoint before it", f"{PORTABLE}/scan.py",
        "first // CHECKPOINT_CHUNKS * CHECKPOINT_CHUNKS, first)", "first, first)",
        "test-kernels", "backends/test_triton.py::test_a_window_may_start_between_checkpoints[(341,)-1]",
    ),
    Mutation(
        "scan: the low half of the state is left out of the erase", f"{PORTABLE}/scan.py",
        "(S[0] - S_low[0].to(tl.float32)).to(dtype)", "tl.zeros_like(S_low[0])",
        "test-kernels", "backends/test_triton.py::test_splitting_the_feedback_in_two_terms_reduces_the_error",
    ),
    Mutation(
        "reverse: the erase adds to the state's gradient", f"{PORTABLE}/reverse.py",
        "dx * -load_gate", "dx * load_gate", "test-kernels", f"{PORTABLE_TEST}[gated delta-one segment-grouped]",
    ),
    Mutation(
        "gradients: the gradient of the decay leaves out the state", f"{PORTABLE}/gradients.py",
        "tl.cumsum(dG, 0, reverse=True) + state_product", "tl.cumsum(dG, 0, reverse=True)",
        "test-kernels", f"{PORTABLE_TEST}[gated delta-one segment-grouped]",
    ),
    Mutation(
        "gradients: only the first value head of a group adds to the keys' gradient", f"{PORTABLE}/gradients.py",
        "for g in range(GROUP):", "for g in range(1):",
        "test-kernels", f"{PORTABLE_TEST}[gated delta-one segment-grouped]",
    ),
    Mutation(
        "gradients: the gradient of beta is divided by a beta of zero", f"{PORTABLE}/gradients.py",
        "db_i = b_db / clamped_b", "db_i = b_db / b_i",
        "test-kernels", "backends/test_triton.py::test_gradients_are_accurate_where_beta_is_zero[gated delta]",
    ),
    Mutation(
        "combine: the maps of segments are not transposed in the backward", f"{PORTABLE}/combine.py",
        "in_keys[row], in_keys[t], K, REVERSE)", "in_keys[row], in_keys[t], K, False)",
        "test-kernels", f"{PORTABLE_TEST}[gated delta-segments-many chunks]",
    ),
    Mutation(
        "zero_tail: the last row beyond the last sequence is not zeroed", f"{PORTABLE}/zero_tail.py",
        "end = last * WIDTH", "end = (last - 1) * WIDTH",
        "test-kernels", "backends/test_triton.py::test_rows_after_the_last_sequence_are_zero[gated delta]",
    ),
    Mutation(
        "micro-step: only an additive update decays the state", f"{TRITON}/decode/kernels/micro_step.py",
        "if DECAYS:", "if DECAYS and not DELTA:", "test-kernels", f"{DECODE_TEST}[gated delta]",
    ),
    Mutation(
        "decode step: every Householder step decays the state", f"{TRITON}/decode/kernels/token.py",
        "DECAYS and m == 0", "DECAYS", "test-kernels", f"{DECODE_TEST}[householders, before]",
    ),
    Mutation(
        "decode step: the slot behind the pool is read and written", f"{TRITON}/decode/kernels/token.py",
        "in_pool = (slot >= 0) & (slot < pool_rows)", "in_pool = (slot >= 0) & (slot <= pool_rows)", "test-kernels",
        "backends/test_triton.py::test_decode_with_a_slot_outside_the_pool_accesses_no_state[gated delta]",
    ),
    Mutation(
        "fused step: the history of the convolution is not shifted", f"{TRITON}/device/taps.py",
        "taps[i + 1].to(", "taps[i].to(", "test-kernels", f"{FUSED_TEST}[gated delta-none]",
    ),
    Mutation(
        "fused step: the feedback weakens the write, too", f"{TRITON}/decode/kernels/fused_step.py",
        "writes = writes + (strength * traits.WRITE_FACTOR,)",
        "writes = writes + (erase_strength * traits.WRITE_FACTOR,)",
        "test-kernels", f"{FUSED_TEST}[comba-all]",
    ),
    Mutation(
        "decode: the erase has the write strength", f"{TRITON}/decode/kernels/token.py",
        "tl.load(erase + step * HV + hv)", "tl.load(write + step * HV + hv)",
        "test-kernels", f"{DECODE_TEST}[comba]",
    ),
    Mutation(
        "fused step: the skip connection is scaled like the output", f"{TRITON}/decode/kernels/fused_step.py",
        "tl.load(skip + hv).to(tl.float32) * v", "tl.load(skip + hv).to(tl.float32) * v * scale",
        "test-kernels", f"{FUSED_TEST}[mamba2-all]",
    ),
    Mutation(
        "short convolution: the taps are applied in the wrong order", CONV_KERNELS,
        "weights = weights[1:] + (w_j.to(tl.float32),)", "weights = (w_j.to(tl.float32),) + weights[: W - 1]",
        "test-kernels", f"{CONV_TEST}[short-torch.float32]",
    ),
    Mutation(
        "short convolution: a sequence of a pack reads the one before it", f"{TRITON}/conv/kernels/rows.py",
        "x_j = tl.where((age < j)[:, None], past, x_j)", "x_j += 0.0 * past",
        "test-kernels", f"{CONV_TEST}[short pack with history-torch.float32]",
    ),
    Mutation(
        "short convolution, backward: the derivative of SiLU lacks a term", CONV_KERNELS,
        "d *= gate + gate * (a - s)", "d *= gate + s", "test-kernels", f"{CONV_TEST}[short-torch.float32]",
    ),
    Mutation(
        "short convolution, backward: a gradient crosses the start of a sequence", CONV_KERNELS,
        "later = clear_at_start(later, is_first, W)", "later = later",
        "test-kernels", f"{CONV_TEST}[short pack with history-torch.float32]",
    ),
    Mutation(
        "element backward: adds up the sums of the wrong interval", f"{TRITON}/element/kernels/backward.py",
        "pending += (1 - interval % 2) * SCRATCH", "pending += interval % 2 * SCRATCH", "test-kernels",
        f"{ELEMENT}[rate, after-one segment-shared keys]",
    ),
    Mutation(
        "element backward: a token at the end misses the one before it", f"{TRITON}/element/kernels/backward.py",
        "for earlier in range(stop, t):", "for earlier in range(stop, t - 1):", "test-kernels",
        "backends/test_triton_element.py::test_strong_decays_conform[rate, after-torch.float32-one segment]",
    ),
    Mutation(
        "element backward: each group starts from the checkpoint", f"{TRITON}/element/kernels/backward.py",
        "S = states[GROUPS - 1]", "S = states[0]", "test-kernels", f"{ELEMENT}[rate, after-one segment-shared keys]",
    ),
    Mutation(
        "element prefetch: reads the row after the last", f"{TRITON}/element/kernels/prefetch.py",
        "rows = tl.minimum(row + i // PER_ROW, last - 1)", "rows = tl.minimum(row + i // PER_ROW, last)",
        "test-kernels", "backends/test_prefetch.py",
    ),
    Mutation(
        "element backward: lanes keep the tile that they send", f"{TRITON}/element/kernels/sums.py",
        "sent = tl.where(is_first, xs[2 * i + 1], xs[2 * i])", "sent = tl.where(is_first, xs[2 * i], xs[2 * i + 1])",
        "test-kernels", f"{ELEMENT}[rate, after-one segment-shared keys]",
    ),
    Mutation(
        "replay: a recording ignores the sizes of its arguments", "backends/triton/runtime/replay.py",
        "key += (x.dtype, x.shape)", "key.append(x.dtype)",
        "test", "backends/test_replay.py::test_calls_with_other_dtypes_sizes_or_traits_are_recorded_anew",
    ),
    Mutation(
        "replay: a view starts where its buffer does", "backends/triton/runtime/replay.py",
        "pointers[tensor] + offset if describe is None", "pointers[tensor] if describe is None",
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
        "Hopper prepare: the erase matrix has k in place of the erase key", f"{HOPPER}/prepare.py",
        "warpgroup_mma(e_s[tk], k_tile", "warpgroup_mma(k_s[tk], k_tile",
        "test-kernels", f"{ERASE_KEY_TEST}[two tiles of keys-own-ordinary-True]",
    ),
    Mutation(
        "Hopper reverse: the low half of du is left out of the state's gradient", f"{HOPPER}/reverse.py",
        "dS1 = issue_outer_products(a_du_low, smem.e, stage, dS1, traits)", "pass",
        "test-kernels", "backends/test_hopper_numbers.py::test_each_product_that_feeds_back_has_two_terms[ordinary]",
    ),
    Mutation(
        "Hopper gradients: the keys' gradient has k in place of the erase key", f"{HOPPER}/gradients.py",
        "dA_s.permute((1, 0)), e_s", "dA_s.permute((1, 0)), k_s",
        "test-kernels", f"{ERASE_KEY_TEST}[two tiles of keys-own-ordinary-True]",
    ),
    Mutation(
        "Hopper gradients: the narrow tile of values has the states of the first values", f"{HOPPER}/value_tiles.py",
        "copy_pointers(S, K, R=16), FIRST * K", "copy_pointers(S, K, R=16), 0",
        "test-kernels", f"{HOPPER_TEST}[narrow tile of values-gated delta-no state-False]",
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
        "Hopper scan: both programs of a tile of values start at its first one", f"{HOPPER}/scan_traits.py",
        "column += gl.where(halved, half * 64, 0)", "pass", "test-kernels",
        "backends/test_hopper_numbers.py::test_programs_of_64_values[states in the rows of gradients]",
    ),
    Mutation(
        "Hopper scan: the narrow tile of keys is copied from the first keys", f"{HOPPER}/scan_producer.py",
        "rings[tk].index(stage), at, tk * 64, rows", "rings[tk].index(stage), at, tk % 3 * 64, rows",
        "test-kernels", f"{HOPPER_TEST}[four tiles of keys-gated delta-no state-False]",
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
        "launch: the fake operator has a wrong number of checkpoint slots", "backends/triton/chunk/op.py",
        "return parse(config).chunk, parse(config).checkpoint_chunks",
        "return parse(config).chunk, parse(config).checkpoint_chunks + 1",
        "test-kernels", "backends/test_triton.py::test_operators_pass_opcheck",
    ),
    Mutation(
        "plan: the windows of the backward run from the first to the last", "backends/triton/chunk/plan.py",
        "for window in reversed(range(span.windows)):", "for window in range(span.windows):",
        "test-kernels", "backends/test_triton.py::test_gradients_do_not_depend_on_the_number_of_windows[()-1]",
    ),
    Mutation(
        "plan: the fused backward is chosen for grouped heads", "backends/triton/chunk/registry.py",
        "values=range(33, 129), grouped=False)", "values=range(33, 129))", "test",
        "backends/test_plan.py::test_plan_follows_from_problem_and_device[change1-device1-sm90_prepare_kernel-"
        "sm90_scan_kernel-sm90_backward_sweep_kernel]",
    ),
    Mutation(
        "plan: gate gradients are launched where no gate has one", "backends/triton/chunk/plan.py",
        "if any(gate_gradients(problem).values()):", "if True:", "test",
        "backends/test_launches.py::test_explain_lists_no_gate_gradients_of_an_update_without_gates[RWKV-7]",
    ),
    Mutation(
        "norm: the gradient of the residual stream is dropped", f"{TRITON}/norm/kernels.py",
        "d_tile += residual", "d_tile += 0.0",
        "test-kernels", "backends/test_triton_norm.py::test_the_norm_of_a_sum_and_its_gradients[shape1-dtype0-True]",
    ),
    Mutation(
        "norm: the gradient of the gate lacks the slope", f"{TRITON}/norm/kernels.py",
        "d_phi = dy_tile * slope", "d_phi = dy_tile",
        "test-kernels", "backends/test_triton_norm.py::test_a_gated_norm_and_its_gradients[shape1-dtype0-silu-False]",
    ),
    Mutation(
        "attention: the sums of the gates lack their low terms", f"{TRITON}/attention/kernels/gates.py",
        "(scaled - high.to(tl.float64))", "(scaled - scaled)", "test-kernels",
        "backends/test_triton_attention.py::"
        "test_gates_after_a_long_forgotten_past_are_as_exact_as_at_the_start[keys as queries]",
    ),
    Mutation(
        "attention: keys with small weights are skipped", f"{TRITON}/attention/kernels/tiles.py",
        "least = -26.0 - tl.log2(length.to(tl.float32))", "least = 0.0", "test-kernels",
        "backends/test_triton_attention.py::"
        "test_forgotten_keys_are_skipped_without_a_change_of_the_results[None-keys as queries]",
    ),
    Mutation(
        "latent attention: the products read a tile before it is copied", f"{TRITON}/attention/kernels/latent_sm90.py",
        "async_copy.wait_group(1)", "async_copy.wait_group(2)", "test-kernels",
        "backends/test_latent_sm90.py::test_heads_attend_to_the_cached_vectors[copies when awaited-3-64-64-4-dtype0]",
    ),
    Mutation(
        "latent attention: a copied tile replaces the other one", f"{TRITON}/attention/kernels/latent_sm90.py",
        "copy_slots(c_tile, r_s.index(buffer)", "copy_slots(c_s.index(1 - buffer), r_s.index(buffer)", "test-kernels",
        "backends/test_latent_sm90.py::test_heads_attend_to_the_cached_vectors[copies when issued-2-512-64-1-dtype0]",
    ),
    Mutation(
        "Mamba: a program decodes only its first tile of rows", f"{TRITON}/element/kernels/selective_step.py",
        "tl.minimum(first + traits.SPAN, B)", "tl.minimum(first + ROWS, B)", "test-kernels",
        "backends/test_selective_step.py::test_a_token_equals_its_equations[40-40-16-3-False-dtype0]",
    ),
    Mutation(
        "glu: the slope of SiLU lacks its second term", "backends/triton/glu/kernels.py",
        "s * (1 + gate * (1 - s))", "s",
        "test-kernels",
        "backends/test_triton_glu.py::test_the_kernels_compute_the_activation_and_its_gradient[9-37-dtype0-silu]",
    ),
    Mutation(
        "glu: the second derivative treats the gradient as a constant", "backends/torch_ext/autograd.py",
        "create_graph=True))", "create_graph=False))",
        "test-kernels", "backends/test_triton_glu.py::test_second_derivatives_equal_those_of_the_definition[silu-none]",
    ),
    Mutation(
        "grouped convolution: a traced output is an intermediate result", "backends/ops/grouped_conv.py",
        "y = y.addcmul(", "y = y.addcmul_(",
        "test", "backends/test_traced_functions.py::test_outputs_are_no_other_results[grouped_convolution-4]",
    ),
]  # fmt: skip
