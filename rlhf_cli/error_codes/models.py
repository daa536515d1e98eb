"""Codes of errors in a tokenizer, a model, or the output of a stage."""

from rlhf_cli.error_codes.code import Code

TOKENS_AND_MODELS = {
    "T01": Code(
        "pad token equals end token",
        0,
        "The pad token is also the end token; a mask by id would hide the end token.",
        "No action is needed: masks use positions, so the end token stays trained.",
    ),
    "T02": Code(
        "no pad token",
        0,
        "The tokenizer has no pad token; [PAD] is added and the embeddings are resized.",
        "No action is needed: the token is saved with the model.",
    ),
    "T03": Code(
        "double start token",
        0,
        "Texts start with two start tokens, one from the template and one from the tokenizer.",
        "Remove one of them from the template or the tokenizer.",
    ),
    "T04": Code(
        "different tokenizer",
        2,
        "The value model or a reward model uses other token ids than the policy.",
        "Train it from the SFT checkpoint. A reward model may differ if models.value is policy_head or a path.",
    ),
    "T05": Code(
        "different chat template",
        2,
        "Two stages use different chat templates.",
        "Use one template for all stages, and run the later stage again.",
    ),
    "T06": Code(
        "stop token not trained",
        0,
        "The chat template does not end an answer with a stop token.",
        "Use a template that ends the assistant's turn with a special token.",
    ),
    "M01": Code(
        "model not found",
        2,
        "The model path is neither a folder nor a model in the local Hub cache.",
        "Correct the path, or download the model first.",
    ),
    "M02": Code(
        "no reward head",
        2,
        "The model has no trained reward head, so its scores would be random.",
        "Set the result of `rlhf reward`, or another trained reward model.",
    ),
    "M03": Code(
        "reward head of the wrong size",
        2,
        "A reward model must return one number; this one returns several.",
        "Use a model with num_labels 1.",
    ),
    "M04": Code(
        "adapter without its base",
        2,
        "The folder contains an adapter that rlhf did not train, or one whose base model is missing or changed.",
        "Restore the base model. Merge an external adapter into its base first, and set the merged model.",
    ),
    "M05": Code(
        "damaged checkpoint",
        1,
        "A checkpoint is incomplete, truncated or changed; an older one is used if it exists.",
        "If an older checkpoint is used, no action is needed; otherwise run the stage again.",
        warns="where an older checkpoint is used",
    ),
    "M06": Code(
        "more token ids than embeddings",
        2,
        "The tokenizer has ids for which the model has no embedding.",
        "Use the tokenizer of the model, or resize the embeddings.",
    ),
    "M07": Code(
        "pickled weights",
        2,
        "The weights exist only as a pickle (.bin), which can run code when it is loaded.",
        "Convert them to safetensors: load them in an environment that you trust, then call save_pretrained().",
    ),
    "M08": Code(
        "repository code needed",
        2,
        "The model requires Python code from its own folder.",
        "Read that code, then allow it with --trust-remote-code.",
    ),
    "M09": Code(
        "reward scores differ",
        1,
        "The scores in PPO differ from those that the reward stage stored for the same rows.",
        "Compare tokenizer, chat template and library versions of the two stages. Nothing is trained.",
    ),
    "M10": Code(
        "input stage unfinished or wrong",
        2,
        "The folder belongs to an unfinished or a wrong stage, or does not contain a decoder-only language model.",
        "Finish that stage first, or set another folder.",
    ),
    "M11": Code(
        "reward model not good enough",
        2,
        "The report card of the reward model does not meet ppo.require_reward, or is missing.",
        "Train a better reward model, or lower the requirement; docs/rewards.md explains each value.",
    ),
    "M12": Code(
        "exported model differs",
        1,
        "The reloaded export differs from the model of the run in logits or tokenizer; the export was removed.",
        "Check the versions of transformers and peft. If --dtype causes the difference, keep the model's dtype.",
    ),
    "M13": Code(
        "weights do not fit the config",
        2,
        "The names, shapes or layers of the weights differ from config.json; missing weights would be random.",
        "Copy or download the whole folder again; config.json and weights must belong to one model.",
    ),
    "M14": Code(
        "input model changed while it was read",
        1,
        "The files of an input model changed after they were hashed, so the manifest would name other weights than "
        "those loaded. The stage is not finished.",
        "Restore the old files and run the same command again, or use --fresh.",
    ),
}
