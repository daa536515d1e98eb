"""What is wrong with a model, a tokenizer, or what a stage left."""

from rlhf_cli.codes.code import Code

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
        warns="where an older checkpoint takes over",
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
        "Train a better reward model, or ask for less; docs/evaluation.md tells what to do about each number.",
    ),
    "M12": Code(
        "the exported model is another one",
        1,
        "Loaded again, the exported model's logits or its tokenizer are not those of the run's own; nothing was left.",
        "Look at the versions of transformers and peft; for a difference that --dtype makes, keep the model's format.",
    ),
    "M13": Code(
        "weights do not fit the config",
        2,
        "The model's files hold other names, shapes or layers than its config.json asks for; the rest would be random.",
        "Copy or download the whole folder again; config.json and weights must be of one model.",
    ),
    "M14": Code(
        "a parent changed while it was read",
        1,
        "The files of a model that the stage starts from were replaced after their hashes were taken: the manifest "
        "would name other weights than those that were loaded. The stage is not finished.",
        "Bring the old files back and give the same command again; or start over with --fresh.",
    ),
}
