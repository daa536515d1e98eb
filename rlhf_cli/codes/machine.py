"""What is wrong with the machine or with what runs on it: a run, rewards, secrets."""

from rlhf_cli.codes.code import Code

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
        warns="where `rlhf check` finds the memory too small",
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
        "pip install -e '.[trackers]' in the clone of rlhf-cli brings all of them; or take the name out.",
    ),
    "E07": Code(
        "no access to the hub",
        2,
        "The hub cannot be reached, does not know the token, or does not let it write the repository that is named.",
        "`hf auth login` with a token that may write, and a repository of your own or of a group that you write for.",
    ),
    "E08": Code(
        "cannot be read now",
        1,
        "A file or folder is there and cannot be read: no permission, or an error of its disk or of a network's file "
        "system; or the folder of a run was moved or deleted while a command wrote into it. It is not taken for "
        "damaged: nothing is trained again, and nothing is moved.",
        "Make it readable, or bring it back, then give the same command again.",
    ),
    "E09": Code(
        "a package of an extra is missing",
        2,
        "A key asks for what only a package of an extra can do: weights or averages in 4 or 8 bits need bitsandbytes.",
        "pip install -e '.[qlora]' in the clone of rlhf-cli; or take the key out.",
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
        warns="until ten updates in a row are so",
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
        warns="where KL is negative",
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
        "Balance the pairs by length, or hold PPO's length with ppo.overlong_penalty. "
        "ppo.require_reward refuses such a model (M11).",
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
        "Sure of too much: fewer epochs or a lower learning rate. Sure of too little: train for longer. "
        "ppo.require_reward refuses such a model (M11).",
    ),
    "R13": Code(
        "the watchdog fired",
        1,
        "A sign that the policy games its reward is beyond its limit in ppo.watchdog; watchdog.jsonl has each reading.",
        "Read samples.jsonl. Raise kl_coef or mend the reward; after a stop model/ holds the best policy.",
        warns="by default (ppo.watchdog.action: warn)",
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
        "Look at the message; docs/commands.md tells what each one needs. metrics.jsonl and samples.jsonl hold it all.",
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
