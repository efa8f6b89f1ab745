"""The planted bugs of mutations.py, and the test that must catch each."""

from mutation_kernels import CONV_KERNELS, CONV_TEST, HOPPER_KERNELS, LAUNCHES, PORTABLE_KERNELS, TRITON, Mutation

EQUATION = "::test_mixer_equals_its_equation"

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
        "compile: the last decay of a chunk has no gradient by the write keys",
        "backends/compile/decayed_keys.py",
        "of_g[:, -1] += d_last.sum(1)", "", "test",
        "backends/test_intra_chunk.py::test_decayed_keys_equal_their_equations_with_their_gradients[early0-qk-3-4]",
    ),
    Mutation(
        "update: the range of the eigenvalues is halved, [0, 1] in place of [-1, 1]", "backends/update/lowering.py",
        "doubled = 2 * erase", "doubled = erase",
        "test", "evidence/test_claims.py::test_parity_needs_negative_eigenvalues",
    ),
    Mutation(
        "compile: the erase term has no beta", "backends/compile/intra_chunk_scalar.py",
        "if x.erase is not None:", "if False:",
        "test", "evidence/test_claims.py::test_parity_needs_negative_eigenvalues",
    ),
    Mutation(
        "devices: the setting of tf32 is not restored", "backends/torch_ext/devices.py",
        "setting.fp32_precision = before", "pass", "test",
        "backends/test_environment.py::test_products_in_tf32_restores_the_setting",
    ),
    Mutation(
        "compile: a read before the update sees the update", "backends/compile/element_scan.py",
        "_read(history[:-1] if read_before else history[1:], x.q[n], o[n])", "_read(history[1:], x.q[n], o[n])",
        "test", "backends/test_element_scan.py::test_element_scan_matches_the_reference[rows-head-before-1]",
    ),
]  # fmt: skip

MIXERS = [
    Mutation(
        "beta: the sigmoid is left out", "mixers/parts/gates/beta.py",
        "raw.to(state_dtype(raw.dtype)).sigmoid()", "raw.to(state_dtype(raw.dtype))",
        "test", f"mixers/test_equations_delta.py{EQUATION}[reference-deltanet]",
    ),
    Mutation(
        "Comba: the feedback weakens the write, too", "mixers/parts/memory/feedback.py",
        "erase=erase, write=beta)", "erase=erase, write=erase)",
        "test", f"mixers/test_equations_delta.py{EQUATION}[reference-comba]",
    ),
    Mutation(
        "Comba: the norm of the erase key has the epsilon of the key", "mixers/parts/memory/feedback.py",
        "(factor.square() * square + EPS)", "(factor.square() * (square + EPS))",
        "test", f"mixers/test_equations_delta.py{EQUATION}[reference-comba, norm after the feedback]",
    ),
    Mutation(
        "decay: dt_bias is ignored", "mixers/parts/gates/decays.py",
        "raw.to(dtype) + dt_bias.to(dtype)", "raw.to(dtype)",
        "test", f"mixers/test_equations_delta.py{EQUATION}[reference-gated_deltanet, doubled erase]",
    ),
    Mutation(
        "rotary: queries and keys rotate the other way", "mixers/parts/rotary.py",
        "rotation_angle(position, frequency_R", "rotation_angle(-position, frequency_R",
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
        "padding: the mask is not applied to the decay", "mixers/core/sequences.py",
        'changed["log_decay"] = masked(per_token)', 'changed["log_decay"] = per_token',
        "test", "mixers/test_states.py::test_padded_rows_equal_unpadded_rows[mamba2-reference-right]",
    ),
    Mutation(
        "drafts: a convolution keeps the inputs of rejected tokens", "backends/ops/conv_history.py",
        "index_BP = accepted[:, None] +", "index_BP = 0 * accepted[:, None] + x.shape[1] +",
        "test", "mixers/test_matrix.py::test_mixer_has_property[gated_deltanet-verify]",
    ),
    Mutation(
        "drafts: a draft after a rejected one is accepted", "backends/ops/prompt_lookup.py",
        "== tokens_BT[:, 1:]).cumprod(1).sum(1)", "== tokens_BT[:, 1:]).sum(1)",
        "test", "blocks/test_speculation.py::test_drafts_stand_up_to_the_first_that_was_not_chosen",
    ),
    Mutation(
        "drafts: in an engine an accepted draft uses no random number", "blocks/generation/engine/row_sampling.py",
        "1 + first_B[:, None] +", "1 + 0 * first_B[:, None] +",
        "test", "blocks/test_engine_drafts.py::test_samples_are_those_of_generate_tokens_with_the_same_seed[True]",
    ),
    Mutation(
        "output gate: a sigmoid instead of SiLU", "backends/ops/rms_norm.py",
        "gate = F.silu(gate)", "gate = gate.sigmoid()",
        "test", f"mixers/test_equations_delta.py{EQUATION}[reference-gated_deltanet, doubled erase]",
    ),
    Mutation(
        "RWKV-7: the token shift mixes in the current token instead of the previous one", "mixers/parts/rwkv/rwkv7.py",
        "x + (previous - x) * mix", "previous + (x - previous) * mix",
        "test", f"mixers/test_equations_delta.py{EQUATION}[reference-rwkv7]",
    ),
    Mutation(
        "MLA: decoding reads the cached latent vectors without the map to values", "mixers/mla.py",
        "weight_HEC[:, self.K :])", "weight_HEC[:, : self.V])",
        "test", "mixers/test_matrix.py::test_mixer_has_property[mla-decode]",
    ),
    Mutation(
        "FoX: padded tokens forget", "mixers/parts/gates/forget_gates.py",
        "torch.where(context.mask[..., None], log_f, 0.0)", "log_f",
        "test", "mixers/test_states.py::test_padded_rows_equal_unpadded_rows[fox-reference-both]",
    ),
    Mutation(
        "PaTH: decoding does not multiply the cached keys", "mixers/path_attention.py",
        'state | {"k": write_back(state["k"], past)}', "state", "test",
        "mixers/test_matrix.py::test_mixer_has_property[path_attention-decode]",
    ),
    Mutation(
        "PaTH: the gradient of the keys misses the later chunks", "backends/ops/householder_attention.py",
        "d_k = d_k + d_own", "pass", "test",
        "mixers/test_equations_attention.py::test_householder_attention_over_many_chunks_equals_the_equation",
    ),
    Mutation(
        "preconditioner: the erase key is preconditioned, too", "mixers/parts/memory/preconditioner.py",
        "erase_key=inputs.k)", "erase_key=(k * factor).to(inputs.k.dtype))",
        "test", f"mixers/test_equations_delta.py{EQUATION}[reference-preconditioned_kda]",
    ),
    Mutation(
        "Mamba-3: the read does not decay", "mixers/parts/ssm/mamba3.py",
        "read = inputs.log_decay.exp()[..., None] * o", "read = o",
        "test", f"mixers/test_equations_additive.py{EQUATION}[reference-mamba3]",
    ),
    Mutation(
        "log-linear attention: the tree of a piece starts at its first token",
        "mixers/parts/memory/log_linear_chunks.py",
        "before + seen_B[:, None]", "before",
        "test", "mixers/test_log_linear.py::test_pieces_that_start_inside_chunks_equal_one_call[gdn-[64, 64, 22]]",
    ),
    Mutation(
        "log-linear attention: the last level passes its tokens on",
        "mixers/parts/memory/log_linear_chunks.py",
        "torch.where(carried_L == last, last, level(t, bucket))", "level(t, bucket)",
        "test", "mixers/test_log_linear.py::test_mixer_equals_its_definition[gdn, two levels]",
    ),
    Mutation(
        "MoM: the weights of the chosen memories do not add up to one", "mixers/mom.py",
        "if self.active > 1:", "if self.active > len(self.weight):",
        "test", "mixers/test_mom.py::test_mixture_of_any_mixer_equals_a_loop_over_tokens[deltanet]",
    ),
    Mutation(
        "short convolution: every group has the weights of the first", CONV_KERNELS,
        "channel += group * traits.C", "channel += 0", "test-kernels", f"{CONV_TEST}[groups-torch.float32]",
    ),
    Mutation(
        "short convolution, backward: tokens before a group add to its gradient", f"{TRITON}/conv/kernels/rows.py",
        "mask = row_mask(row, low, high, in_channels)", "mask = row_mask(row, 0 * low, high, in_channels)",
        "test-kernels", f"{CONV_TEST}[groups in one strip-torch.float32]",
    ),
    Mutation(
        "MoM: the convolution reads the tokens of another memory", "backends/ops/grouped_conv.py",
        "inside_A = position_A >= shift", "inside_A = row_A >= shift",
        "test", "mixers/test_mom.py::test_mixture_of_any_mixer_equals_a_loop_over_tokens[deltanet]",
    ),
    Mutation(
        "load balance: only the first layer counts", "mixers/parts/memory/routing.py",
        "statistics_L2E.mean(0)", "statistics_L2E[0]",
        "test", "blocks/test_losses.py::test_losses_equal_their_definitions_over_all_layers[8-None]",
    ),
    Mutation(
        "MoE: the weights of the active experts do not add up to one", "blocks/model/moe.py",
        "if config.normalize:", "if not config.normalize:",
        "test", "blocks/test_moe.py::test_equals_the_published_block[qwen3_next]",
    ),
]  # fmt: skip

BLOCKS = [
    Mutation(
        "loss: the target is the token itself", "blocks/data/text.py", "window[:, 1:]", "window[:, :-1]",
        "test", "blocks/test_text.py::test_targets_are_the_inputs_shifted_by_one_byte",
    ),
    Mutation(
        "loss: ignored targets count in the mean", "backends/ops/cross_entropy.py",
        "(targets_N != ignore_index).sum()", "torch.tensor(targets_N.numel())",
        "test", "backends/test_cross_entropy.py::test_equals_its_definition_in_value_and_gradient[4-mean-None-None]",
    ),
    Mutation(
        "loss: the gradient ignores the cap of the logits", "backends/ops/cross_entropy.py",
        "p_RL *= slope(z_RL)", "pass",
        "test", "backends/test_cross_entropy.py::test_equals_its_definition_in_value_and_gradient[4-mean-None-1.5]",
    ),
    Mutation(
        "loss: the backward ignores the scale of the loss", "backends/ops/cross_entropy.py",
        "torch.mul(gradient, factor.reshape(1), out=out)", "out.copy_(gradient)",
        "test", "backends/test_cross_entropy.py::test_tied_weights_and_accumulated_gradients_add_up",
    ),
    Mutation(
        "layer: the residual connection of DeepNorm passes by the norm", "blocks/model/layer.py",
        "self.residual_scale * normed_BTD", "self.residual_scale * x_BTD",
        "test", "blocks/test_hybrids.py::test_logits_and_gradients_equal_those_of_transformers[MiniMax]",
    ),
    Mutation(
        "layer: shared layers have separate weights",
        "blocks/spec/stack_spec.py", "if spec.share in shared:", "if False:",
        "test", "blocks/test_layer.py::test_shared_layers_have_one_set_of_weights_and_a_state_for_each_place",
    ),
    Mutation(
        "checkpoint: the step is not restored", "blocks/training/run.py",
        'self.step = self.saved_step = state["step"]', "self.saved_step = 0",
        "test", "blocks/test_train.py::test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit",
    ),
    Mutation(
        "checkpoint: the random generator is not restored", "blocks/training/run.py",
        'torch.set_rng_state(decoded(mine["cpu"]))', "pass",
        "test", "blocks/test_train.py::test_resume_restores_the_random_generator",
    ),
    Mutation(
        "checkpoint: the digest is not verified", "blocks/checkpoints/sharded.py",
        "and _digest(path) != digest:", "and False:",
        "test", "blocks/test_train.py::test_a_flipped_byte_anywhere_in_a_checkpoint_is_reported",
    ),
    Mutation(
        "checkpoint: edits of fixed settings are accepted", "blocks/checkpoints/folder.py",
        "if problem := refused(changes, folder / STACK):", "if problem := None:",
        "test", "blocks/test_train.py::test_a_fixed_setting_changes_neither_by_an_argument_nor_in_the_file[seed]",
    ),
    Mutation(
        "sampling: the temperature multiplies the logits", "blocks/generation/sampling.py",
        "keepdim=True)) / sampling.temperature", "keepdim=True)) * sampling.temperature",
        "test", "blocks/test_generate.py::test_top_k_and_top_p_equal_a_direct_computation[None-None-0.5]",
    ),
]  # fmt: skip

MUTATIONS = [*PORTABLE_KERNELS, *HOPPER_KERNELS, *LAUNCHES, *COMPILE_BACKEND, *MIXERS, *BLOCKS]
