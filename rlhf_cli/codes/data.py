"""What is wrong with a file of data."""

from rlhf_cli.codes.code import Code

DATA = {
    "D01": Code(
        "data file missing",
        2,
        "A data file is not there or cannot be read.",
        "Correct the path; in a YAML it is relative to the YAML's folder.",
    ),
    "D02": Code(
        "column missing",
        2,
        "The rows lack a column that this stage needs.",
        "Name the file's column under data.columns, or use a file of the right form.",
    ),
    "D03": Code(
        "malformed JSON",
        2,
        "A line is not valid JSON; data files hold one JSON object a line.",
        "Correct the line at the place given.",
    ),
    "D04": Code(
        "not UTF-8",
        2,
        "The file holds bytes that are not UTF-8 text.",
        "Convert it, for example: iconv -f latin1 -t utf8 FILE",
    ),
    "D05": Code(
        "no usable row",
        2,
        "The file is empty, or every row was dropped.",
        "The message counts how many rows were lost to what.",
    ),
    "D06": Code(
        "null or not text",
        2,
        "A column holds null, a number or another type where text is needed.",
        "Correct or remove the rows.",
        warns="with data.on_bad: drop",
    ),
    "D07": Code(
        "chosen equals rejected",
        2,
        "A pair of identical answers holds no preference, but still costs training.",
        "Remove the rows, or set data.on_identical: drop.",
        warns="with data.on_identical: drop, and in prompts",
    ),
    "D08": Code(
        "empty prompt",
        2,
        "A prompt is empty or only white space.",
        "Correct or remove the rows.",
        warns="with data.on_bad: drop",
    ),
    "D09": Code(
        "empty completion",
        2,
        "A completion is empty, or nothing of it is left after truncation.",
        "Correct or remove the rows, or allow more tokens.",
        warns="with data.on_bad: drop",
    ),
    "D10": Code(
        "too long",
        2,
        "Rows are longer than the token limit.",
        "Set data.on_long: drop, raise the limit, or shorten the rows.",
        warns="with data.on_long: drop, the default",
    ),
    "D11": Code(
        "fewer rows than a batch",
        2,
        "There are fewer usable rows than one batch takes.",
        "Lower the batch size, or bring more rows.",
    ),
    "D12": Code(
        "rows of different kinds",
        2,
        "Rows of one file have different types or columns, or are no JSON objects.",
        "Make the two lines that the message names alike.",
        warns="with data.on_bad: drop",
    ),
    "D13": Code(
        "evaluation prompts in training",
        0,
        "Prompts of the evaluation also occur in training.",
        "Take them out of one of the files, or read the result with care.",
    ),
    "D14": Code(
        "no chat template",
        2,
        "The rows are conversations, but the tokenizer has no chat template.",
        "Set model.chat_template: chatml, or to a template of your own.",
    ),
    "D15": Code(
        "contradicting pairs",
        0,
        "The same pair occurs twice, or once in each direction.",
        "Remove one of the lines, where that is not meant.",
    ),
    "D16": Code(
        "too many rows left out",
        2,
        "More rows are left out than data.max_dropped allows: too long, bad, or pairs of identical answers. What is "
        "left may be another kind of data than the whole.",
        "The message counts the rows by cause. Too long: raise max_length, lower response_length, or take a base model "
        "with a longer context; data.on_long: error shows the rows. Else mend the rows, or raise data.max_dropped.",
        warns="above 20 % of the rows",
    ),
}
