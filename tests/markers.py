"""Which tests are `long` and which are `slow`, by how many cases of a test function are not.

`pytest` alone leaves out `long`. It ends within 4 minutes on two cores and calls every public function of what is
installed. `pytest -m "not slow"` also leaves out `slow`, and takes about half a minute.
"""

from collections import Counter

ALL = 10**6

# By file, or by function: of each test function, the first cases are not `long`, and fewer of them are not `slow`.
CASES = {
    "tests/cuda/test_compile.py": (0, 0),
    "tests/cuda/test_compile.py::test_a_missing_macro_is_an_error_that_names_it": (1, 0),
    "tests/cuda/test_compile.py::test_hopper_takes_hoppers_kernels": (1, 0),
    "tests/cuda/test_launch_config.py::test_dispatch_of_any_size_with_99_kib_of_shared_memory": (ALL, 0),
    "tests/cuda/test_launch_limits.py": (3, 1),
    "tests/cuda/test_loader.py::test_a_program_that_ends_compiles_nothing_more": (ALL, 0),
    "tests/cuda/test_loader.py::test_all_variants_of_a_source_are_given_the_same_macros": (ALL, 0),
    "tests/cuda/test_loader.py::test_names_tell_variants_apart": (ALL, 0),
    "tests/cuda/test_loader.py::test_variants_are_those_the_layer_launches": (4, 1),
    "tests/cuda/test_loader.py::test_a_digest_follows_a_source_and_what_it_includes": (ALL, 0),
    "tests/cuda/test_loader.py::test_import_takes_less_than_0_4_seconds": (ALL, 0),
    "tests/cuda/test_overlapping_launch.py": (ALL, 0),
    "tests/cuda/test_runtime.py": (ALL, 1),
    "tests/cuda/test_runtime.py::test_a_second_call_asks_for_what_the_first_did": (1, 0),
    "tests/fp8/test_device_fp8.py": (1, 0),
    "tests/fp8/test_device_fp8.py::test_integers_are_exact": (0, 0),
    "tests/fp8/test_device_wgrad_fp8.py": (1, 0),
    "tests/fp8/test_fp8_rows.py": (1, 0),
    "tests/fp8/test_fp8_rows.py::test_layer": (0, 0),
    "tests/fp8/test_quantize.py": (ALL, 0),
    "tests/fp8/test_saved_fp8.py": (1, 0),
    "tests/fp8/test_wgrad_fp8.py": (ALL, 0),
    "tests/fsdp/test_fsdp.py::test_addresses_are_freed_after_a_capture": (ALL, 0),
    "tests/layer/test_chunks.py::test_passes_stay_within_the_limit": (10, 2),
    "tests/layer/test_combinations.py": (1, 0),
    "tests/layer/test_device_chunks.py": (1, 0),
    "tests/layer/test_device_code.py": (1, 0),
    "tests/layer/test_device_code_bound.py": (2, 0),
    "tests/layer/test_device_code_sm90.py": (1, 0),
    "tests/layer/test_device_experts.py": (1, 0),
    "tests/layer/test_device_slots.py": (1, 0),
    "tests/layer/test_same_bits.py": (ALL, 1),
    "tests/layer/test_slots.py::test_against_transformers": (1, 0),
    "tests/layer/test_tf32.py::test_kernels_round_operands": (2, 0),
    "tests/layer/test_tf32.py::test_options_are_beside_it": (1, 0),
    "tests/lora/test_device_lora.py": (2, 0),
    "tests/lora/test_device_lora.py::test_places_of_factors_change_no_bit": (0, 0),
    "tests/lora/test_device_lora_fp8.py": (0, 0),
    "tests/lora/test_device_lora_fp8.py::test_factors_are_multiplied_in_bf16": (1, 0),
    "tests/lora/test_device_lora_fp8.py::test_zeros_of_second_factors_change_no_bit": (1, 0),
    "tests/megatron/test_megatron.py": (ALL, 0),
    "tests/megatron/test_megatron.py::test_run_reaches_specs_that_megatron_makes_while_it_is_imported": (0, 0),
    "tests/megatron/test_megatron.py::test_two_ranks": (0, 0),
    "tests/parallel/test_exchange.py": (ALL, 0),
    "tests/parallel/test_rank_processes.py::test_a_case_fails_alone": (ALL, 0),
    "tests/quantised/test_decode.py::test_machine_code_keeps_denormals_and_stores_16_bytes": (ALL, 0),
    "tests/quantised/test_encode.py::test_machine_code_keeps_denormals": (ALL, 0),
    "tests/quantised/test_layer_e4m3.py::test_on_the_emulator": (4, 1),
    "tests/quantised/test_layer_quantised.py::test_a_captured_call_decodes_for_itself": (ALL, 0),
    "tests/quantised/test_layer_quantised.py::test_another_stream_has_memory_of_its_own": (ALL, 0),
    "tests/quantised/test_layer_quantised.py::test_on_the_emulator": (ALL, 2),
    "tests/quantised/test_layer_quantised.py::test_two_layers_in_turn": (ALL, 1),
    "tests/quantised/test_torch_quantised.py::test_compiled_code_calls_it_between_graphs": (ALL, 0),
    "tests/reference/test_reference.py": (ALL, 8),
    "tests/reference/test_reference.py::test_dispatch_equals_stable_sort_for_any_ids": (ALL, 0),
    "tests/router/test_balancing.py::test_transformers_loss_is_that_of_transformers": (1, 0),
    "tests/router/test_device_code_router.py": (1, 0),
    "tests/router/test_routing_transformers.py::test_a_models_own_router": (ALL, 4),
    "tests/rows/test_device_code_pull.py": (ALL, 0),
    "tests/rows/test_push.py": (4, 0),
    "tests/selection/test_device_code_selection.py": (1, 0),
    "tests/startup/test_run.py::test_launchers": (2, 0),
    "tests/startup/test_run.py::test_which_models_get_the_layer": (ALL, 0),
    "tests/startup/test_run.py::test_exit_status": (ALL, 1),
    "tests/startup/test_run.py::test_the_command_gets_its_own_words": (ALL, 0),
    "tests/startup/test_trainers.py": (1, 0),
    "tests/test_accuracy.py": (1, 0),
    "tests/test_accuracy.py::test_the_record_has_every_provider_kind_and_seed": (0, 0),
    "tests/test_automodel.py": (ALL, 0),
    "tests/test_bench.py": (1, 0),
    "tests/test_bench.py::test_host_times_of_this_checkout_beside_itself": (0, 0),
    "tests/test_bench.py::test_suites_run_and_their_record_says_what_it_is_of": (0, 0),
    "tests/test_bench.py::test_a_regression_against_a_record_fails": (0, 0),
    "tests/test_bench_card.py::test_it_runs_tiny_shapes_without_a_gpu": (0, 0),
    "tests/test_bench_command.py": (ALL, 0),
    "tests/test_bench_long_sequences.py": (ALL, 0),
    "tests/test_bench_lora.py": (ALL, 0),
    "tests/test_bench_parallel.py": (0, 0),
    "tests/test_bench_routing.py": (ALL, 0),
    "tests/test_bench_saves.py": (ALL, 0),
    "tests/test_checks.py::test_a_missing_torch_is_named_with_the_line_that_installs_it": (ALL, 1),
    "tests/test_checks.py::test_the_environment_asks_for_the_check_of_ids": (ALL, 1),
    "tests/test_dlpack.py::test_jax": (ALL, 0),
    "tests/test_dlpack.py::test_jax_inside_its_transforms": (ALL, 0),
    "tests/test_dlpack.py::test_jax_of_every_dtype": (ALL, 0),
    "tests/test_dlpack.py::test_jax_of_other_dtypes_is_refused": (ALL, 0),
    "tests/test_emulator.py": (ALL, 0),
    "tests/test_emulator_sm90.py": (ALL, 0),
    "tests/test_examples.py": (ALL, 0),
    "tests/test_examples.py::test_example_on_the_cpu": (1, 0),
    "tests/test_examples.py::test_the_program_of_the_page_on_many_gpus": (0, 0),
    "tests/test_language_model.py": (1, 0),
    "tests/test_machine_code.py": (0, 0),
    "tests/test_markers.py::test_a_call_leaves_out_what_it_does_not_name": (ALL, 0),
    "tests/test_plots.py": (1, 0),
    "tests/test_results.py": (ALL, 0),
    "tests/test_train.py": (ALL, 0),
    "tests/test_train.py::test_first_steps_of_the_default_run_learn": (0, 0),
    "tests/tools/test_cli.py": (ALL, 1),
    "tests/tools/test_cli.py::test_compile_compiles_what_the_layer_launches": (4, 0),
    "tests/tools/test_cli.py::test_a_reader_that_leaves_is_no_error": (ALL, 0),
    "tests/tools/test_cli.py::test_closed_streams": (ALL, 0),
    "tests/tools/test_cli.py::test_help_names_every_command": (ALL, 0),
    "tests/tools/test_cli.py::test_info_with_a_broken_cupy": (ALL, 0),
    "tests/tools/test_cli.py::test_no_command_prints_the_help": (ALL, 0),
    "tests/tools/test_memory.py": (ALL, 6),
    "tests/torch/test_balancing_torch.py::test_losses_compile_to_one_graph": (ALL, 0),
    "tests/torch/test_balancing_torch.py::test_one_graph_is_refused_with_the_reason": (ALL, 0),
    "tests/torch/test_compile_torch.py": (1, 0),
    "tests/torch/test_compile_torch.py::test_inductor_overwrites_what_was_saved_without_a_copy": (0, 0),
    "tests/torch/test_compile_torch.py::test_two_backwards_of_compiled_code": (0, 0),
    "tests/torch/test_pytorch_page.py::test_the_programs_run_in_order_and_print": (ALL, 0),
    "tests/torch/test_sharded_torch.py": (1, 0),
    "tests/torch/test_sharded_torch.py::test_sharded_training_equals_that_of_one_process": (0, 0),
    "tests/torch/test_torch.py": (4, 1),
    "tests/torch/test_torch.py::test_a_step_loads_nothing_of_torchs_compiler": (ALL, 0),
    "tests/torch/test_torch_fp8.py": (2, 0),
    "tests/torch/test_torch_fp8_operators.py": (2, 0),
    "tests/torch/test_torch_lora.py::test_compiled_code_calls_it_between_graphs": (ALL, 0),
    "tests/torch/test_torch_lora.py::test_module_under_autocast_and_compiled": (ALL, 0),
    "tests/torch/test_torch_ops.py": (1, 0),
    "tests/transformers/test_trainers_lora.py": (0, 0),
    "tests/transformers/test_trainers_lora.py::test_trainer_saves_and_resumes": (1, 0),
    "tests/transformers/test_transformers.py": (4, 0),
    "tests/transformers/test_transformers.py::test_trainer": (0, 0),
    "tests/transformers/test_transformers.py::test_compiles_to_one_graph": (1, 0),
    "tests/transformers/test_transformers.py::test_compiled_modules_follow_their_constants": (0, 0),
    "tests/transformers/test_transformers_fp8.py": (2, 0),
    "tests/transformers/test_transformers_fp8.py::test_weights_that_are_held": (0, 0),
    "tests/transformers/test_transformers_lora.py": (2, 0),
    "tests/transformers/test_transformers_lora.py::test_steps_of_a_model_and_its_adapters_on_disk": (1, 0),
    "tests/transformers/test_transformers_lora.py::test_trainer": (0, 0),
    "tests/transformers/test_transformers_load.py": (2, 0),
    "tests/transformers/test_transformers_routing.py": (2, 0),
    "tests/transformers/test_transformers_routing.py::test_a_router_makes_weights_of_given_ids": (ALL, 4),
    "tests/transformers/test_transformers_routing.py::test_ids_that_do_not_fit_raise": (ALL, 2),
    "tests/transformers/test_transformers_parallel.py": (ALL, 0),
    "tests/transformers/test_transformers_quantised.py": (2, 0),
}


def leave_out_long(config):
    """Where the call names neither a path nor markers."""
    if not config.option.markexpr and config.args_source != config.ArgsSource.ARGS:
        config.option.markexpr = "not long"


def has_no_test_of(call: str, file: str) -> bool:
    """Whether the markers of a call leave out all of a file, which then need not be imported."""
    of_file = [not_slow for name, (_, not_slow) in CASES.items() if name.partition("::")[0] == file]
    return call == "not slow" and file in CASES and not any(of_file)


def mark(items):
    """items: in the order of their definition. Those on a GPU are `slow`, and left out where there is none."""
    counts = Counter()
    for item in items:
        function = item.nodeid.partition("[")[0]
        counts[function] += 1
        not_long, not_slow = CASES.get(function) or CASES.get(function.partition("::")[0], (ALL, ALL))
        on_gpu = item.get_closest_marker("gpu") or item.get_closest_marker("gpus")
        if counts[function] > not_long and not on_gpu:
            item.add_marker("long")
        if counts[function] > not_slow or on_gpu or item.get_closest_marker("long"):
            item.add_marker("slow")
