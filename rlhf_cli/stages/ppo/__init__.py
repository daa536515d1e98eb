"""`rlhf ppo`: load four models and the prompts, loop, save."""

from rlhf_cli import checkpoints, data, terminal
from rlhf_cli.config import Options, PPOConfig
from rlhf_cli.inputs import ppo as inputs
from rlhf_cli.models import loading, tokenizers, trees
from rlhf_cli.ppo.metrics import Stats, objective
from rlhf_cli.ppo.records import Prompts
from rlhf_cli.signals import StopWish
from rlhf_cli.stages.ppo import parts as making
from rlhf_cli.stages.ppo.samples import SampleTables
from rlhf_cli.tracking import MetricsLog

RATIO_TOLERANCE = 1e-3  # in float32 it is 0, the update runs on the judge's own micro-batches
HEADLINE = ("objective/scores", "objective/kl_k1", "objective/response_length", "objective/eos_fraction")


def run(config: PPOConfig, options: Options) -> None:
    """Train a policy by PPO and leave RUN/ppo. Goes on from the last state where there is one."""
    parents = checkpoints.open_parents(config)
    identity = checkpoints.identity(config, parents, config.sources())
    status = checkpoints.begin(config, identity, fresh=options.fresh)
    if status == "finished":
        terminal.say(f"ppo      finished already: {checkpoints.shown(config.folder)}")
        return
    parts = making.load(config, options, parents)
    state = checkpoints.latest_state(config.folder / "state") if status == "resume" else None
    if state:
        parts.trainer.load_state_dict(trees.load_tree(state))
        terminal.say(f"ppo      resumes at step {parts.trainer.updates} of {parts.updates}")
    train(config, parts)
    save_models(config, parts)
    fields = {
        **tokenizers.token_fields(parts.tokenizer, parts.stop_token_id),
        "metrics": headline(config, parts),
        "step": parts.trainer.updates,
        "model_is": "the last step",
    }
    checkpoints.finish(config, identity, parents=parents, fields=fields)


def train(config: PPOConfig, parts: making.Parts) -> None:
    """The loop over updates. SIGTERM or SIGINT: saves after the step and exits 143 or 130."""
    trainer, settings, folder = parts.trainer, config.ppo, config.folder
    terminal.say(f"ppo      {inputs.arithmetic(config, len(parts.prompts))}")
    if settings.kl_in == "reward" and settings.kl_estimator != "k1":
        text = f"kl_estimator {settings.kl_estimator} in the reward does not have the KL's policy gradient"
        terminal.warn("C18", text, where=config.where("ppo.kl_estimator"), hint="k1 has it; or set kl_in: loss")
    metrics = MetricsLog(folder / "metrics.jsonl", resume_at=trainer.updates)
    samples = SampleTables(folder / "samples.jsonl", parts, settings, resume_at=trainer.updates)
    save_every = config.output.save_steps or max(1, parts.updates // 10)
    snapshots = snapshot_steps(parts.updates, config.output.snapshots)
    with StopWish() as stop, terminal.Progress("ppo", parts.updates, "update") as bar:
        bar.advance(trainer.updates)
        while trainer.updates < parts.updates:
            picked = data.prompt_batch(
                len(parts.prompts), trainer.updates + 1, settings.prompts_per_update, config.seed
            )
            stats = trainer.step(Prompts.from_lists([parts.prompts[i].ids for i in picked]))
            step = trainer.updates
            metrics.log(step, stats)
            if stats["policy/first_ratio_error"] > RATIO_TOLERANCE:
                text = f"the first ratio of an update is off 1 by {stats['policy/first_ratio_error']:.2g}"
                terminal.warn("R07", text, where=f"step {step}", hint="another precision or attention code may help")
            samples.show(step)
            bar.advance(note=status_line(stats))
            if step in snapshots:
                save_snapshot(config, parts, step)
            if step % save_every == 0 or step == parts.updates or stop.wished:
                checkpoints.commit_state(
                    folder / "state",
                    f"step_{step:06d}",
                    lambda path: trees.save_tree(path, trainer.state_dict()),
                    keep=config.output.keep,
                )
            if stop.wished and step < parts.updates:
                terminal.say(
                    f"ppo      stopped at step {step} of {parts.updates}, saved; the same command goes on from here"
                )
                raise SystemExit(stop.exit_code)


def headline(config: PPOConfig, parts: making.Parts) -> Stats:
    """Score, KL and length of the finished policy, over new responses to the run's first prompts."""
    asked = Prompts.from_lists([prompt.ids for prompt in parts.prompts[: config.ppo.episodes_per_update]])
    judged = parts.trainer.judge(parts.trainer.generate(asked, purpose="headline"))
    found = objective(judged, in_reward=config.ppo.kl_in == "reward")
    return {name: found[name] for name in HEADLINE}


def status_line(stats: Stats) -> str:
    reward, kl, length = (stats[name] for name in ("objective/scores", "objective/kl_k1", "objective/response_length"))
    return f"reward {reward:.3f}  KL {kl:.2f}  length {length:.1f}  {stats['tokens_per_s']:.0f} tokens/s"


def snapshot_steps(updates: int, count: int) -> set[int]:
    """`count` steps spread evenly over the run, the last one among them."""
    return {round(updates * k / count) for k in range(1, count + 1)} - {0} if count else set()


def save_snapshot(config: PPOConfig, parts: making.Parts, step: int) -> None:
    """The policy alone, as a plain Hugging Face folder, for looking back; not for resuming."""
    card = f"Policy after {step} of {parts.updates} PPO updates."
    checkpoints.commit_state(
        config.folder / "snapshots",
        f"step_{step:06d}",
        lambda path: loading.save_model(parts.trainer.policy, parts.tokenizer, path, card),
        keep=max(1, config.output.snapshots),
    )


def save_models(config: PPOConfig, parts: making.Parts) -> None:
    """model/ is the policy, value/ the value model; both load with from_pretrained."""
    sizes = f"{parts.trainer.updates} PPO updates of {config.ppo.episodes_per_update} episodes"
    trained = f"{sizes}, KL coefficient {config.ppo.kl_coef}"
    loading.save_model(parts.trainer.policy, parts.tokenizer, config.folder / "model", f"Policy after {trained}.")
    loading.save_model(parts.trainer.value, parts.tokenizer, config.folder / "value", f"Value model after {trained}.")
