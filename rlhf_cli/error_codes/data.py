"""Codes of errors in data files."""

from rlhf_cli.error_codes.code import Code

DATA = {
    "D01": Code(
        "data file missing",
        2,
        "A data file does not exist or cannot be read.",
        "Correct the path; in a YAML it is relative to the folder of the YAML.",
    ),
    "D02": Code(
        "column missing",
        2,
        "The rows lack a column that the stage requires.",
        "Map the column of the file under data.columns, or use a file with the required columns.",
    ),
    "D03": Code(
        "malformed JSON",
        2,
        "A line is not valid JSON; data files contain one JSON object per line.",
        "Correct the line at the given location.",
    ),
    "D04": Code(
        "not UTF-8",
        2,
        "The file contains bytes that are not UTF-8.",
        "Convert it, for example: iconv -f latin1 -t utf8 FILE",
    ),
    "D05": Code(
        "no usable row",
        2,
        "The file is empty, or every row was dropped.",
        "Fix the causes that the message counts.",
    ),
    "D06": Code(
        "null or not text",
        2,
        "A column contains null, a number or another type instead of text.",
        "Correct or remove the rows.",
        warns="with data.on_bad: drop",
    ),
    "D07": Code(
        "chosen equals rejected",
        2,
        "The two answers of a pair are identical, so the pair has no preference.",
        "Remove the rows, or set data.on_identical: drop.",
        warns="with data.on_identical: drop, and in prompts",
    ),
    "D08": Code(
        "empty prompt",
        2,
        "A prompt is empty or contains only whitespace.",
        "Correct or remove the rows.",
        warns="with data.on_bad: drop",
    ),
    "D09": Code(
        "empty completion",
        2,
        "A completion is empty, or empty after truncation.",
        "Correct or remove the rows, or raise the token limit.",
        warns="with data.on_bad: drop",
    ),
    "D10": Code(
        "too long",
        2,
        "Rows exceed the token limit.",
        "Set data.on_long: drop, raise the limit, or shorten the rows.",
        warns="with data.on_long: drop, the default",
    ),
    "D11": Code(
        "fewer rows than a batch",
        2,
        "There are fewer usable rows than one batch needs.",
        "Lower the batch size, or add rows.",
    ),
    "D12": Code(
        "rows of different kinds",
        2,
        "Rows of one file differ in type or columns, or are not JSON objects.",
        "Give the two lines in the message the same columns and types.",
        warns="with data.on_bad: drop",
    ),
    "D13": Code(
        "evaluation prompts in training",
        0,
        "Some evaluation prompts also occur in the training data.",
        "Remove them from one of the files; data.eval_fraction makes a clean split.",
    ),
    "D14": Code(
        "no chat template",
        2,
        "The rows are conversations, but the tokenizer has no chat template.",
        "Set model.chat_template to chatml or to a Jinja file.",
    ),
    "D15": Code(
        "contradicting pairs",
        0,
        "The same pair occurs twice, or in both directions.",
        "Remove one of the two lines, unless it is intended.",
    ),
    "D16": Code(
        "too many rows dropped",
        2,
        "More rows were dropped than data.max_dropped allows: too long, bad, or with identical answers. The "
        "remaining rows may not represent the data.",
        "The message counts the rows by cause. For long rows, raise max_length, lower response_length, or use a "
        "model with a longer context; data.on_long: error lists the rows. Otherwise correct the rows, or raise "
        "data.max_dropped.",
        warns="above 20 % of the rows",
    ),
}
