"""What is wrong with a config, or a command line."""

from rlhf_cli.codes.code import Code

CONFIG = {
    "C01": Code(
        "unknown key",
        2,
        "No config of this stage has a key of this name.",
        "Correct the spelling, or take the line out; `rlhf explain KEY` tells what a key does.",
    ),
    "C02": Code(
        "key in the wrong section",
        2,
        "The key exists, but under another section or in another stage's file.",
        "Move the line to the place that the message names.",
    ),
    "C03": Code(
        "duplicate key",
        2,
        "The same key is written twice in one section, so one of the two would be lost.",
        "Keep one of the two lines.",
    ),
    "C04": Code(
        "number in scientific notation",
        0,
        "`1e-5` is read as a number, with or without a decimal point.",
        "Nothing to do.",
    ),
    "C05": Code(
        "wrong or missing value",
        2,
        "A value has another type than its key wants, or a needed key is absent.",
        'Write a value of the expected type; strict typing means that "8" in quotes is no number.',
    ),
    "C06": Code(
        "number out of range",
        2,
        "A number is outside the bounds of its key, is nan or inf, or is true/false.",
        "Choose a value inside the bounds that the message gives.",
    ),
    "C07": Code(
        "not one of the choices",
        2,
        "The key takes one of a few words, and this is none of them.",
        "Take one of the choices that the message lists.",
    ),
    "C08": Code(
        "YAML syntax",
        2,
        "The file is not valid YAML at the place given; tabs cannot indent.",
        "Correct the line; indent with spaces, quote text that starts with a special character.",
    ),
    "C09": Code(
        "config cannot be read",
        2,
        "There is no such config, or it is a folder, empty, a list, or not UTF-8.",
        "Give the path of a YAML file that holds keys and values.",
    ),
    "C10": Code(
        "YAML 1.1 surprise",
        2,
        "Older YAML reads `off`, `012` or `1:30` as something else than what is written. "
        "Here such a text stays a text, and is refused where a number or true/false is wanted.",
        "Write true or false, plain decimal numbers, or put text in quotes.",
    ),
    "C11": Code(
        "bad override",
        2,
        "An override must read KEY=VALUE with the full path of a key.",
        "For example: --set ppo.kl_coef=0.1",
    ),
    "C12": Code(
        "batch sizes that do not divide",
        2,
        "Batch sizes must divide without a remainder; no row is dropped.",
        "Take one of the sizes that the message names.",
    ),
    "C13": Code(
        "longer than the context",
        2,
        "Prompt and response together pass the model's number of positions.",
        "Lower one of them by the amount that the message gives.",
    ),
    "C14": Code(
        "interval beyond the end",
        0,
        "A save or evaluation interval is larger than the number of steps.",
        "Nothing is lost: the last step is always saved. Lower the interval for more.",
    ),
    "C15": Code(
        "output of another config",
        2,
        "The output folder holds the result of other settings or other inputs.",
        "Run with --fresh (the old output is moved aside), or choose another run folder.",
    ),
    "C16": Code(
        "secret in the config",
        2,
        "A token or password is written in the file; configs are copied and logged.",
        "Take it out and put it in the environment, for example HF_TOKEN. Then replace the secret.",
    ),
    "C17": Code(
        "contradicting settings",
        2,
        "Each of the settings is fine alone, together they contradict each other.",
        "Change one of the keys that the message names.",
    ),
    "C18": Code(
        "not what it may seem",
        0,
        "The setting works as described, but an expert would hardly choose it.",
        "The hint names what usually is meant.",
    ),
}
