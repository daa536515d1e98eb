"""Names of the files that the hash of a model covers."""

from rlhf_cli.runs.model_files import is_model_file


def test_names_of_files_that_a_hash_covers() -> None:
    covered = ["model.safetensors", "tokenizer.json", "chat_template.jinja", "w-1-of-2.safetensors"]
    assert all(map(is_model_file, covered))
    assert not any(map(is_model_file, ["", "..", ".w.safetensors", "../w.json", "a/w.json", "w.weights", "w", "w.bin"]))
