"""Every code that a user may meet, and the tests that put it through the real CLI: code, place, fix and exit code.

The first tests hold the table against `rlhf_cli/error_codes/` and, where ../shared is there, against BAD-INPUTS.md.
"""

import ast
import re
from pathlib import Path

import pytest
from conftest import SHARED
from typer.testing import CliRunner

from rlhf_cli.cli import app
from rlhf_cli.error_codes import CODES

HERE = Path(__file__).parent
INPUTS, DATA, MODELS, ALARMS = "test_bad_inputs", "test_bad_data", "test_bad_models", "test_stage_ppo_alarms"
ADAPTERS = "test_bad_adapters"
TESTS: dict[str, list[str]] = {
    "C01": [f"{INPUTS}::test_c01_unknown_key"],
    "C02": [f"{INPUTS}::test_c02_key_in_the_wrong_section"],
    "C03": [f"{INPUTS}::test_c03_duplicate_key"],
    "C04": [f"{INPUTS}::test_c04_1e5_is_a_number"],
    "C05": [f"{INPUTS}::test_c05_wrong_type"],
    "C06": [f"{INPUTS}::test_c06_out_of_range", f"{ALARMS}::test_c06_more_shared_layers_than_there_are"],
    "C07": [
        f"{INPUTS}::test_c07_not_one_of_the_choices",
        f"{INPUTS}::test_c07_a_config_given_to_the_wrong_command_is_one_line",
    ],
    "C08": [f"{INPUTS}::test_c08_syntax"],
    "C09": [f"{INPUTS}::test_c09_config_missing", f"{INPUTS}::test_c09_what_is_no_config"],
    "C10": [f"{INPUTS}::test_c10_what_older_yaml_would_convert_is_refused"],
    "C11": [f"{INPUTS}::test_c11_bad_override"],
    "C12": [f"{INPUTS}::test_c12_batches_that_do_not_divide"],
    "C13": [
        f"{INPUTS}::test_c13_a_new_model_of_fewer_positions_than_max_length",
        f"{INPUTS}::test_c13_rows_longer_than_the_context",
        f"{INPUTS}::test_c13_a_response_that_leaves_no_room",
    ],
    "C14": [f"{INPUTS}::test_c14_an_interval_beyond_the_end", f"{INPUTS}::test_c14_in_ppo"],
    "C15": [f"{INPUTS}::test_c15_output_of_another_config"],
    "C16": [f"{INPUTS}::test_c16_a_token_in_the_config"],
    "D01": [
        f"{DATA}::test_d01_data_file_missing",
        f"{DATA}::test_d01_what_is_no_file",
        f"{DATA}::test_d01_a_file_that_may_not_be_read",
    ],
    "D02": [f"{DATA}::test_d02_column_missing"],
    "D03": [f"{DATA}::test_d03_malformed_json", f"{DATA}::test_d03_a_key_that_stands_twice"],
    "D04": [f"{DATA}::test_d04_not_utf8"],
    "D05": [f"{DATA}::test_d05_no_usable_row"],
    "D06": [f"{DATA}::test_a_bad_row_is_told_by_its_line"],
    "D07": [f"{DATA}::test_a_bad_row_is_told_by_its_line"],
    "D08": [
        f"{DATA}::test_a_bad_row_is_told_by_its_line",
        f"{DATA}::test_d08_pairs_that_begin_with_nothing_in_common",
    ],
    "D09": [f"{DATA}::test_a_bad_row_is_told_by_its_line", f"{DATA}::test_d09_nothing_left_of_a_completion"],
    "D10": [f"{DATA}::test_d10_rows_that_are_too_long"],
    "D11": [
        f"{DATA}::test_d11_fewer_rows_than_an_optimizer_step_takes",
        f"{DATA}::test_d11_fewer_prompts_than_an_update_takes",
    ],
    "D12": [f"{DATA}::test_a_bad_row_is_told_by_its_line"],
    "D13": [f"{DATA}::test_d13_evaluation_prompts_that_are_trained_on", f"{DATA}::test_d13_in_the_later_stages"],
    "D14": [f"{DATA}::test_d14_a_conversation_without_a_chat_template"],
    "D15": [f"{DATA}::test_d15_pairs_that_repeat_or_contradict_another"],
    "D16": ["test_left_out::test_max_dropped_says_where_a_stage_stops"],
    "T01": [f"{MODELS}::test_t01_pad_is_eos"],
    "T02": [f"{MODELS}::test_t02_no_pad_token"],
    "T03": [f"{MODELS}::test_t03_two_start_tokens"],
    "T04": [
        f"{MODELS}::test_t04_a_reward_model_of_another_tokenizer",
        "test_rewards_retold::test_t04_the_value_model_is_no_copy_of_such_a_model",
    ],
    "T05": [
        f"{MODELS}::test_t05_template_differs_between_stages",
        "test_stage_ppo::test_t05_reward_of_another_template",
    ],
    "T06": [f"{MODELS}::test_t06_a_template_that_never_trains_the_stop_token"],
    "M01": [f"{MODELS}::test_m01_model_path_wrong"],
    "M02": [f"{MODELS}::test_m02_causal_model_as_reward"],
    "M03": [f"{MODELS}::test_m03_a_reward_model_of_two_labels"],
    "M04": [
        f"{MODELS}::test_m04_an_adapter_in_place_of_a_model",
        "test_adapters::test_m04_a_base_of_the_hub_goes_by_its_id",
        f"{ADAPTERS}::test_m04_the_base_is_gone",
        f"{ADAPTERS}::test_m04_the_base_has_changed_since",
        f"{ADAPTERS}::test_m04_the_sft_stage_below_a_reward_adapter_was_made_anew",
    ],
    "M05": [
        f"{MODELS}::test_m05_a_finished_stage_that_was_changed",
        f"{MODELS}::test_m05_a_state_with_a_flipped_bit_is_passed_over",
        f"{ALARMS}::test_m05_a_state_of_an_older_version",
    ],
    "M06": [f"{MODELS}::test_m06_token_ids_beyond_the_embedding"],
    "M07": [f"{MODELS}::test_m07_weights_that_are_a_pickle"],
    "M08": [f"{MODELS}::test_m08_code_of_the_models_own"],
    "M09": ["test_stage_ppo::test_m09_scores_that_do_not_come_back"],
    "E01": [
        "test_machine::test_e01_float16_on_the_cpu",
        "test_machine::test_e01_the_stages_say_it_too_and_train_in_float32",
    ],
    "E02": ["test_adapters::test_e02_4_bits_learn_and_a_cpu_is_called_slow"],
    "E03": [
        "test_machine::test_e03_a_disk_too_small_for_the_states",
        "test_machine::test_e03_a_memory_too_small",
        "test_machine::test_e03_an_output_that_cannot_be_written",
        "test_machine::test_e03_a_disk_that_is_full_on_the_way",
        "test_machine::test_e03_memory_that_runs_out_on_the_way",
    ],
    "E04": ["test_machine::test_e04_several_processes"],
    "R01": [
        f"{ALARMS}::test_r01_names_step_row_prompt_and_the_last_good_checkpoint",
        "test_stage_sft::test_r01_a_loss_that_is_no_number_stops_the_run_before_it_is_saved",
    ],
    "R02": [f"{ALARMS}::test_r02_equal_rewards_warn_once_end_the_run_after_ten_updates_and_count_on_after_a_resume"],
    "R03": [f"{ALARMS}::test_r03_responses_that_never_end"],
    "R04": [
        f"{ALARMS}::test_r04_kl_stop_ends_the_run_and_keeps_the_best_policy",
        f"{ALARMS}::test_r04_warns_of_a_kl_below_zero_beyond_noise",
    ],
    "R05": [
        "test_stage_ppo::test_r05_a_reward_function_that_misbehaves",
        f"{ALARMS}::test_r05_a_reward_function_that_raises_leaves_a_state_to_go_on_from",
    ],
    "S02": ["test_config_files::test_an_unsafe_file_is_refused_in_under_a_second"],
    "S03": [
        "test_checkpoints::test_a_manifest_entry_that_leads_out_is_refused",
        "test_checkpoints::test_a_link_that_leads_out_is_refused",
        "test_security::test_a_run_name_is_a_plain_word",
        "test_security::test_parts_of_weights_outside_of_their_folder_are_refused",
    ],
}
# No message of its own: what is harmless is shown.
HARMLESS = {
    "S01": [
        "test_terminal::test_no_way_out_lets_control_characters_through",
        "test_security::test_hostile_names_in_errors_and_warnings_are_harmless",
        "test_security_runs::test_hostile_texts_and_names_go_through_a_training_and_do_nothing",
    ]
}


def test_every_test_named_above_exists_and_speaks_of_its_code() -> None:
    for code, names in {**TESTS, **HARMLESS}.items():
        for file, name in (name.split("::") for name in names):
            source = (HERE / f"{file}.py").read_text(encoding="utf-8")
            nodes = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
            found = [node for node in nodes if node.name == name]
            assert len(found) == 1, f"{file}::{name} is not there"
            first = min(node.lineno for node in [*found, *found[0].decorator_list])
            text = "\n".join(source.splitlines()[first - 1 : found[0].end_lineno])
            assert code in text.upper() or code in HARMLESS, f"{file}::{name} does not look for {code}"


def rows() -> dict[str, str]:
    """Code -> exit column, of BAD-INPUTS.md."""
    path = SHARED / "BAD-INPUTS.md"
    if not path.is_file():
        pytest.skip("../shared/BAD-INPUTS.md is not there")
    return dict(re.findall(r"(?m)^\| ([A-Z]\d\d) \|.*\| ([^|]+) \|$", path.read_text(encoding="utf-8")))


def test_no_row_of_the_shared_table_is_missing() -> None:
    assert rows().keys() <= TESTS.keys() | HARMLESS.keys()


def test_exit_codes_are_those_of_the_shared_table() -> None:
    """Of several the worst one; a code that only warns has 0."""
    for code, exits in rows().items():
        assert CODES[code].exit == max(map(int, re.findall(r"\b[012]\b", exits)), default=0) or code == "R02", code
    assert CODES["R02"].exit == 1  # "1 after 10"


@pytest.mark.parametrize("code", CODES)
def test_explain_tells_each_code(code: str) -> None:
    told = CliRunner().invoke(app, ["explain", code])
    assert told.exit_code == 0 and told.stderr == ""
    said = " ".join(told.stdout.split())
    assert all(text in said for text in (code, CODES[code].title, CODES[code].meaning, CODES[code].fix)), said
