"""Codes of errors of the machine, a run, its rewards and its security."""

from rlhf_cli.error_codes.code import Code

MACHINE_AND_RUN = {
    "E01": Code(
        "not available on this machine",
        0,
        "The requested dtype, offloading or sharding is not supported on this machine.",
        "No action is needed: the message says what is used instead. dtype: auto avoids it.",
    ),
    "E02": Code(
        "4-bit on the CPU",
        0,
        "4-bit weights work on a CPU, but slowly.",
        "Use a GPU or a small model.",
    ),
    "E03": Code(
        "not enough disk or memory",
        2,
        "The disk is too small or read-only, or the memory is too small.",
        "Free the amount in the message, or write to another disk.",
        warns="where `rlhf check` finds the memory too small",
    ),
    "E04": Code(
        "wrong number of processes",
        2,
        "The number of running processes does not match the request, or they do not form one process group.",
        "Start them with --nproc N or with torchrun; `accelerate launch --cpu` always starts one process.",
    ),
    "E05": Code(
        "resumed in another environment",
        0,
        "The run resumes with other library versions or on another device. The result is valid, but not bit-for-bit "
        "that of an uninterrupted run.",
        "No action is needed unless you need identical bits: then resume in the original environment, or use --fresh.",
    ),
    "E06": Code(
        "tracker not installed",
        2,
        "output.report_to names an experiment tracker whose library is not installed.",
        "Run pip install -e '.[trackers]' in the clone of rlhf-cli, or remove the name.",
    ),
    "E07": Code(
        "no access to the Hugging Face Hub",
        2,
        "The Hub cannot be reached, rejects the token, or does not allow writing to the repository.",
        "Run `hf auth login` with a write token, and name a repository that you can write to.",
    ),
    "E08": Code(
        "file cannot be read now",
        1,
        "A file or folder exists but cannot be read (permissions, disk or network file system), or the run folder "
        "was moved or deleted while a command wrote to it. It is not treated as damaged: nothing is retrained or "
        "moved.",
        "Make it readable or restore it, then run the same command again.",
    ),
    "E09": Code(
        "package of an extra missing",
        2,
        "A key needs the package of an optional extra: 4-bit and 8-bit weights and optimizer moments need "
        "bitsandbytes.",
        "Run pip install -e '.[qlora]' in the clone of rlhf-cli, or remove the key.",
    ),
    "R00": Code(
        "failed at run time",
        1,
        "The stage failed with an error that has no code.",
        "Run again with --debug for the full traceback.",
    ),
    "R01": Code(
        "not a finite number",
        1,
        "A reward, loss or gradient is NaN or infinite; training stopped.",
        "Check the row in the message; lower the learning rate, or resume from the last checkpoint.",
    ),
    "R02": Code(
        "all rewards equal",
        1,
        "All rewards of an update are equal, so there is nothing to learn.",
        "Check the reward model, and check that the responses differ. Ten such updates in a row stop the run.",
        warns="until ten updates in a row",
    ),
    "R03": Code(
        "responses never end",
        0,
        "Fewer than one response in twenty has a stop token, or nearly all are empty.",
        "Check the stop token, the stop tokens in the SFT data, and response_length.",
    ),
    "R04": Code(
        "KL too high or negative",
        1,
        "The KL to the SFT policy exceeds ppo.kl_stop, or is negative beyond noise.",
        "Raise kl_coef or lower the learning rate. model/ holds the best policy; manifest.json names its step.",
        warns="where KL is negative",
    ),
    "R05": Code(
        "reward source failed",
        1,
        "A reward source raised an error, did not answer, or returned an invalid value. The updates before it are "
        "saved.",
        "Return one finite number per response.",
    ),
    "R06": Code(
        "requirement not met",
        1,
        "A requirement of eval.require is not met, or no policy is within the limit of eval.select.",
        "Compare the value and the limit in the message.",
    ),
    "R07": Code(
        "the first ratio is not 1",
        0,
        "The log-probs of the update's first forward pass differ from those of the scoring pass, although no step "
        "was taken in between.",
        "This is normal at reduced precision. In float32 it indicates dropout or a non-deterministic model.",
    ),
    "R08": Code(
        "minibatch skipped",
        0,
        "The mean probability ratio of a minibatch exceeded ppo.ratio_threshold, so its optimizer step was skipped.",
        "Lower the learning rate or num_ppo_epochs; policy/skipped_minibatches in metrics.jsonl counts them.",
    ),
    "R09": Code(
        "not pushed to the Hub",
        0,
        "The best policy could not be uploaded. Training continues, and the folder stays on this machine.",
        "See the message; upload it later with `hf upload REPO FOLDER`.",
    ),
    "R10": Code(
        "reward correlated with length",
        0,
        "The scores of the reward model rise or fall with the answer length, so PPO would optimise the length.",
        "Balance the pairs by length, or limit the length with ppo.overlong_penalty. ppo.require_reward rejects "
        "such a model (M11).",
    ),
    "R11": Code(
        "reward prefers a probe",
        0,
        "A deliberately bad answer scores above the chosen answer too often: an empty answer, one repeated token, "
        "only politeness, the good answer repeated, or the good answer to another prompt.",
        "Add pairs that reject such answers, and look for them in PPO's samples.",
    ),
    "R12": Code(
        "reward badly calibrated",
        0,
        "The probabilities implied by the score margins do not match the accuracy on the evaluation pairs.",
        "If overconfident, use fewer epochs or a lower learning rate; if underconfident, train longer. "
        "ppo.require_reward rejects such a model (M11).",
    ),
    "R13": Code(
        "watchdog signal exceeded",
        1,
        "A signal of reward hacking exceeds its limit in ppo.watchdog; watchdog.jsonl records each one.",
        "Read samples.jsonl. Raise kl_coef or fix the reward. After a stop, model/ holds the best policy.",
        warns="by default (ppo.watchdog.action: warn)",
    ),
    "R14": Code(
        "another process ended",
        1,
        "One of the processes of the run ended, and the others cannot continue without it.",
        "Read the message of that process; the same command resumes from the last checkpoint.",
    ),
    "R15": Code(
        "report not written",
        0,
        "The evaluation is complete, but report.html could not be drawn or written; report.json has all values.",
        "See the message; `rlhf report RUN` writes the report at any time.",
    ),
    "R16": Code(
        "tracker failed",
        0,
        "An experiment tracker could not be opened, written or reached. It is skipped; the result of the run is "
        "unaffected.",
        "See the message; the documentation lists the requirements of each tracker. metrics.jsonl and samples.jsonl "
        "are complete.",
    ),
    "R17": Code(
        "push to the Hub failed",
        1,
        "The upload was interrupted, or the files on the Hub differ from those sent. The folder is complete on this "
        "machine.",
        "Run the command at the end of the message to resume; uploaded files are not sent again.",
    ),
    "S01": Code(
        "control characters",
        0,
        "Text of a model or a user contains control characters or markup.",
        "No action is needed: it is escaped.",
    ),
    "S02": Code(
        "unsafe config",
        2,
        "The file is too large, nested too deeply, expands without end, or names Python objects.",
        "Use a plain YAML file of keys and values.",
    ),
    "S03": Code(
        "unsafe name",
        2,
        "A name or path points outside its folder.",
        "Use letters, digits, `-`, `_` and `.`, or a relative path inside the folder.",
    ),
}
