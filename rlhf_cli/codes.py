"""Every stable code that a message may carry; `rlhf explain CODE` prints this table."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Code:
    """One code: `exit` is the exit status of an error with it; 0 says that it only ever warns."""

    title: str
    exit: int
    meaning: str
    fix: str


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
    ),
    "D07": Code(
        "chosen equals rejected",
        2,
        "A pair of identical answers holds no preference, but still costs training.",
        "Remove the rows, or set data.on_identical: drop.",
    ),
    "D08": Code("empty prompt", 2, "A prompt is empty or only white space.", "Correct or remove the rows."),
    "D09": Code(
        "empty completion",
        2,
        "A completion is empty, or nothing of it is left after truncation.",
        "Correct or remove the rows, or allow more tokens.",
    ),
    "D10": Code(
        "too long",
        2,
        "Rows are longer than the token limit; with data.on_long: drop this is a warning.",
        "Set data.on_long: drop, raise the limit, or shorten the rows.",
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
}
TOKENS_AND_MODELS = {
    "T01": Code(
        "pad is the end token",
        0,
        "The pad token is the end token; masking by id would hide the end token.",
        "Nothing to do: masks are made by position, so the end token stays trained.",
    ),
    "T02": Code(
        "no pad token",
        0,
        "The tokenizer has no pad token; [PAD] is added and the embeddings grow.",
        "Nothing to do: the token is saved with the model.",
    ),
    "T03": Code(
        "double start token",
        0,
        "Texts start with two start tokens: template and tokenizer each add one.",
        "Take one of the two out of the template or the tokenizer.",
    ),
    "T04": Code(
        "model of another tokenizer",
        2,
        "A policy or value model reads other token ids than the policy writes.",
        "Train it from the SFT checkpoint. A reward model may differ where models.value is policy_head or a PATH.",
    ),
    "T05": Code(
        "another chat template",
        2,
        "Two stages were trained with different chat templates.",
        "Use one template for all stages, and run the later stage again.",
    ),
    "T06": Code(
        "stop token not trained",
        0,
        "The chat template writes no token that ends an answer.",
        "Use a template that closes the assistant's turn with a special token.",
    ),
    "M01": Code(
        "no such model",
        2,
        "The model path is neither a folder nor a model in the local hub cache.",
        "Correct the path, or download the model first.",
    ),
    "M02": Code(
        "no reward head",
        2,
        "The model has no trained reward head; its scores would be random.",
        "Name the result of `rlhf reward`, or another trained reward model.",
    ),
    "M03": Code(
        "reward head of the wrong size",
        2,
        "A reward model must give one number; this one gives several.",
        "Use a model with num_labels 1.",
    ),
    "M04": Code(
        "adapter without its base",
        2,
        "The folder holds an adapter that no stage made, or one whose base model is not there or has changed since.",
        "Bring the base model back; an adapter of others is merged into it first, and the merged model named.",
    ),
    "M05": Code(
        "damaged checkpoint",
        1,
        "A checkpoint is half written, truncated or changed; an older one is used where there is one.",
        "Nothing to do if an older checkpoint took over; else run the stage again.",
    ),
    "M06": Code(
        "more token ids than embeddings",
        2,
        "The tokenizer knows ids that the model has no embedding for.",
        "Use the tokenizer that belongs to the model, or resize the embeddings.",
    ),
    "M07": Code(
        "pickled weights",
        2,
        "The weights are only there as a pickle (.bin), which can run code when read.",
        "Convert them to safetensors: load once where you trust them and save_pretrained().",
    ),
    "M08": Code(
        "repository code needed",
        2,
        "The model wants to run Python code from its own folder.",
        "Read that code, then allow it with --trust-remote-code.",
    ),
    "M09": Code(
        "reward scores differ",
        1,
        "PPO's scores of the stored rows are not those of the reward stage.",
        "Do not train on it: check the tokenizer, the template and the versions of both stages.",
    ),
    "M10": Code(
        "parent stage unfinished, or of another kind",
        2,
        "The folder belongs to a stage that is unfinished or the wrong one, or holds no decoder-only language model.",
        "Finish that stage first, or name another folder.",
    ),
    "M11": Code(
        "reward model not good enough",
        2,
        "The reward model's report card does not hold what ppo.require_reward asks, or it has no card.",
        "Train a better reward model, or ask for less; docs/reward-card.md tells what to do about each number.",
    ),
    "M12": Code(
        "the exported model is another one",
        1,
        "Loaded again, the exported model's logits or its tokenizer are not those of the run's own; nothing was left.",
        "Look at the versions of transformers and peft; for a difference that --dtype makes, keep the model's format.",
    ),
}
MACHINE_AND_RUN = {
    "E01": Code(
        "not available on this machine",
        0,
        "This machine cannot do what is asked for: a number format, offloading, cutting models up.",
        "Nothing to do: the message says what is done instead; dtype: auto avoids it.",
    ),
    "E02": Code("4-bit on the CPU", 0, "4-bit weights work on the CPU, but slowly.", "Use a GPU, or a small model."),
    "E03": Code(
        "too little room",
        2,
        "The disk is too small or read-only, or the memory is too small.",
        "Free some room, or write to another place.",
    ),
    "E04": Code(
        "wrong number of processes",
        2,
        "Other processes came up than were asked for, or ones that do not know of each other.",
        "Start them with --nproc N, or with torchrun; `accelerate launch --cpu` starts one whatever it is asked for.",
    ),
    "E05": Code(
        "resumed in another environment",
        0,
        "The run goes on with other versions of its libraries, or on another device, than it was started with. It is a "
        "good run, but not byte for byte the one that it would have been.",
        "Nothing, if you can live with that; else go on where it was started, or start over with --fresh.",
    ),
    "E06": Code(
        "a tracker is not installed",
        2,
        "output.report_to names an experiment tracker whose library is not there.",
        "pip install 'rlhf-cli[trackers]' brings all of them; or take the name out.",
    ),
    "E07": Code(
        "no access to the hub",
        2,
        "The hub cannot be reached, does not know the token, or does not let it write the repository that is named.",
        "`hf auth login` with a token that may write, and a repository of your own or of a group that you write for.",
    ),
    "R00": Code(
        "failed at run time",
        1,
        "Something failed while the stage ran that has no code of its own.",
        "Run again with --debug for the full traceback.",
    ),
    "R01": Code(
        "not a finite number",
        1,
        "A reward, loss or gradient is NaN or infinite; training stopped.",
        "Look at the row named; lower the learning rate, or start from the last good checkpoint.",
    ),
    "R02": Code(
        "all rewards equal",
        1,
        "All rewards of an update are the same, so there is nothing to learn.",
        "Check the reward model, and whether the responses differ. Ten such updates in a row stop the run.",
    ),
    "R03": Code(
        "responses never end",
        0,
        "Fewer than one response in twenty ends by itself, or nearly all of them are empty.",
        "Check the stop token, the SFT data's end token, and response_length.",
    ),
    "R04": Code(
        "KL runs away",
        1,
        "The policy moved further from the SFT model than ppo.kl_stop allows, or KL is negative beyond noise.",
        "Raise kl_coef or lower the learning rate; model/ holds the best policy, manifest.json says of which step.",
    ),
    "R05": Code(
        "source of reward failed",
        1,
        "A source of reward raised an error, did not answer, or gave something unusable; the updates before are saved.",
        "It must return one finite number for each response.",
    ),
    "R06": Code(
        "requirement not met",
        1,
        "A line of eval.require does not hold for this result, or no policy is within the bound of eval.select.",
        "The message gives the value and the bound.",
    ),
    "R07": Code(
        "the first ratio is not 1",
        0,
        "The update's first forward pass disagrees with the judge's, though nothing was trained in between.",
        "It happens with reduced precision. In float32 it points to dropout, or to a model that is not deterministic.",
    ),
    "R08": Code(
        "a minibatch was skipped",
        0,
        "Its mean probability ratio passed ppo.ratio_threshold, so it made no optimizer step.",
        "Lower the learning rate or num_ppo_epochs; policy/skipped_minibatches counts them in metrics.jsonl.",
    ),
    "R09": Code(
        "not pushed to the hub",
        0,
        "The best policy could not be uploaded; training goes on, and the folder stays on this machine.",
        "Look at the message; `hf upload REPO FOLDER` does it later.",
    ),
    "R10": Code(
        "the reward follows the length",
        0,
        "The reward model's scores rise, or fall, with the length of the answer: PPO would write by length.",
        "Balance the pairs by length, or hold PPO's length with ppo.overlong_penalty.",
    ),
    "R11": Code(
        "the reward likes a probe too well",
        0,
        "An answer made to be bad scores above the chosen answer too often: empty, one token repeated, politeness "
        "alone, the good answer over and over, or the good answer to another prompt.",
        "Add pairs in which such answers are rejected, and look at PPO's samples for them.",
    ),
    "R12": Code(
        "the reward is badly calibrated",
        0,
        "Margins between two answers say other chances than come true on the evaluation pairs.",
        "Sure of too much: fewer epochs or a lower learning rate. Sure of too little: train for longer.",
    ),
    "R13": Code(
        "the watchdog fired",
        1,
        "A sign that the policy games its reward is beyond its limit in ppo.watchdog; watchdog.jsonl has each reading.",
        "Read samples.jsonl. Raise kl_coef or mend the reward; after a stop model/ holds the best policy.",
    ),
    "R14": Code(
        "one of several processes ended",
        1,
        "Of the processes that train together one has ended, and the others cannot go on without it.",
        "Look at what that one said; the same command goes on from the last state.",
    ),
    "R15": Code(
        "the page was not made",
        0,
        "The evaluation is done, and its report.html could not be drawn or written; report.json has all its numbers.",
        "Look at the message; `rlhf report RUN` makes the page at any time.",
    ),
    "R16": Code(
        "a tracker failed",
        0,
        "An experiment tracker could not be opened, written or reached. It is left alone; the run is what it would be.",
        "Look at the message; docs/trackers.md tells what each one needs. metrics.jsonl and samples.jsonl hold it all.",
    ),
    "R17": Code(
        "the push to the hub failed",
        1,
        "The upload broke off, or what the hub holds is not what was sent; the folder is whole on this machine.",
        "The message ends in the command that goes on; what was uploaded before is not sent again.",
    ),
    "S01": Code(
        "control characters",
        0,
        "Model or user text holds control characters or markup.",
        "Nothing to do: it is shown as harmless text.",
    ),
    "S02": Code(
        "unsafe config",
        2,
        "The file is too large, nests too deeply, unfolds without end, or names Python objects.",
        "Use a plain YAML file of keys and values.",
    ),
    "S03": Code(
        "unsafe name",
        2,
        "A name or path points outside the folder it belongs in.",
        "Use letters, digits, `-`, `_` and `.`, or a relative path inside the folder.",
    ),
}
CODES: dict[str, Code] = {**CONFIG, **DATA, **TOKENS_AND_MODELS, **MACHINE_AND_RUN}
