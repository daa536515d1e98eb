"""Commands of other systems (TRL, LLaMA-Factory, axolotl, W&B, brew), and what does their work here."""

_TRAIN = "rlhf run DIR trains all stages of a folder; one alone: rlhf sft --config FILE, or reward, ppo, eval"
_PUSH = "rlhf export RUN --out DIR writes a plain model folder, adapters merged; --push REPO uploads it"
_PAIRS = "there is no such stage; rlhf reward and rlhf ppo learn from the same pairs: rlhf init preferences"
_GROUPS = "there is no such stage; PPO learns from the same rewards: rlhf ppo --config FILE"

ELSEWHERE = {
    "train": _TRAIN,
    "finetune": _TRAIN,
    "serve": "rlhf export RUN --out DIR, then: vllm serve DIR; to talk to it here: rlhf chat RUN",
    "vllm-serve": "rlhf export RUN --out DIR, then: vllm serve DIR",
    "compare": "rlhf report A B shows runs side by side",
    "sweep": (
        "for x in 0.02 0.05; do cp -r runs/mine runs/kl-$x && rlhf run runs/kl-$x -s ppo.kl_coef=$x; done; "
        "rlhf report runs/kl-*"
    ),
    "merge": _PUSH,
    "push": _PUSH,
    "doctor": "rlhf env shows versions and devices, rlhf check DIR what is wrong with a run",
    "dpo": _PAIRS,
    "kto": _PAIRS,
    "orpo": _PAIRS,
    "grpo": _GROUPS,
    "rloo": _GROUPS,
}
