"""Codes of errors in a config or on a command line."""

from rlhf_cli.error_codes.code import Code

CONFIG = {
    "C01": Code(
        "unknown key",
        2,
        "No config of this stage has a key of this name.",
        "Correct the spelling or remove the line; `rlhf explain KEY` describes a key.",
    ),
    "C02": Code(
        "key in the wrong section",
        2,
        "The key exists in another section or in another stage's file.",
        "Move the line to the section that the message names.",
    ),
    "C03": Code(
        "duplicate key",
        2,
        "The same key occurs twice in one section, so one of the two values would be lost.",
        "Remove one of the two lines.",
    ),
    "C04": Code(
        "number in scientific notation",
        0,
        "`1e-5` is read as a number, with or without a decimal point.",
        "No action is needed.",
    ),
    "C05": Code(
        "wrong or missing value",
        2,
        "A value has the wrong type, or a required key is missing.",
        'Set a value of the expected type. Types are strict: "8" in quotes is text, not a number.',
    ),
    "C06": Code(
        "number out of range",
        2,
        "A number is out of bounds, nan or inf, or true/false was given for a number.",
        "Set a value within the bounds in the message.",
    ),
    "C07": Code(
        "not one of the choices",
        2,
        "The key accepts a fixed set of values, and this is not one of them.",
        "Use one of the choices in the message.",
    ),
    "C08": Code(
        "YAML syntax",
        2,
        "The file is not valid YAML at the given location. Tabs cannot be used for indentation.",
        "Correct the line: indent with spaces, and quote text that starts with a special character.",
    ),
    "C09": Code(
        "config cannot be read",
        2,
        "The config does not exist, or it is a folder, empty, a list, or not UTF-8.",
        "Pass the path of a YAML file with keys and values.",
    ),
    "C10": Code(
        "YAML 1.1 surprise",
        2,
        "YAML 1.1 converts `off`, `012` or `1:30` to other values. rlhf reads them as text and rejects them for a "
        "number or true/false.",
        "Write true or false, or a plain decimal number; put text in quotes.",
    ),
    "C11": Code(
        "bad override",
        2,
        "An override must have the form KEY=VALUE with the full path of a key.",
        "Example: --set ppo.kl_coef=0.1",
    ),
    "C12": Code(
        "batch sizes that do not divide",
        2,
        "Batch sizes must divide without a remainder, because no row is dropped.",
        "Use one of the sizes in the message.",
    ),
    "C13": Code(
        "longer than the context",
        2,
        "Prompt and response together exceed the context length of the model.",
        "Lower one of them by the amount in the message.",
    ),
    "C14": Code(
        "interval beyond the end",
        0,
        "A checkpoint or evaluation interval is larger than the number of steps.",
        "No action is needed: the last step is always saved. Lower the interval to save more often.",
    ),
    "C15": Code(
        "output of another config",
        2,
        "The output folder holds a result with other settings or other inputs.",
        "Use --fresh, which moves the old output aside, or set another run folder.",
    ),
    "C16": Code(
        "secret in the config",
        2,
        "The file contains a token or password, but configs are copied and logged.",
        "Remove it, replace the secret at its provider, and set it in the environment, for example as HF_TOKEN.",
    ),
    "C17": Code(
        "contradicting settings",
        2,
        "Each setting is valid, but they contradict each other.",
        "Change one of the keys in the message.",
    ),
    "C18": Code(
        "unusual setting",
        0,
        "The setting works as documented but is rarely intended.",
        "The hint names the usual setting.",
    ),
}
