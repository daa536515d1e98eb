"""`rlhf ppo`: load four models and the prompts, loop, save."""

from rlhf_cli import checkpoints, terminal
from rlhf_cli.config import Options, PPOConfig
from rlhf_cli.errors import RLHFError
from rlhf_cli.inputs import machine, reward_cards
from rlhf_cli.inputs import ppo as inputs
from rlhf_cli.models import devices, loading, reading, saving, tokenizers
from rlhf_cli.models.batch import Prompts
from rlhf_cli.models.parallel import ProcessGroup, open_process_group
from rlhf_cli.ppo.metrics import Stats, rollout_metrics
from rlhf_cli.ppo.monitor import StopTraining
from rlhf_cli.stages.ppo import parts as making
from rlhf_cli.stages.ppo.training import Training
from rlhf_cli.verdict.rewards import TRAINING, UNPENALISED, reward

HEADLINE = ("objective/scores", "objective/kl_k1", "objective/response_length", "objective/eos_fraction")


def run(config: PPOConfig, options: Options) -> None:
    """Train a policy by PPO and leave RUN/ppo. Goes on from the last state where there is one.

    Where ppo.kl_stop or the watchdog ends the run, RUN/ppo is finished with the best policy so far, and the error is
    raised all the same: R04, R13. Raises M05 where that policy's snapshot came to harm, E04, R14.
    """
    with open_process_group() as process_group:
        _run(config, options, process_group)


def _run(config: PPOConfig, options: Options, process_group: ProcessGroup) -> None:
    parents = checkpoints.open_parents(config)
    identity = checkpoints.identity(config, parents, config.sources())
    if options.fresh or checkpoints.examine(config, identity).state != "finished":
        reward_cards.require(config, parents)  # before --fresh moves anything aside
    status = process_group.run_on_main(
        lambda: checkpoints.begin(config, identity, parents, fresh=options.fresh, device=devices.device_name())
    )
    if status == "finished":
        terminal.say(f"ppo      finished already: {checkpoints.shown(config.folder)}")
        return
    memory = machine.check(config, parents)
    config = inputs.of_group(config, process_group.world_size)
    parts = making.load(config, options, parents, process_group)
    checkpoints.require_unchanged(parents)
    if memory:
        terminal.say(f"ppo      {memory}")
    training = Training(config, parts, resume=status == "resume")
    stopped: StopTraining | None = None
    step, told = parts.updates, {"model_is": "the last step"}
    try:
        training.run()
    except StopTraining as stop:
        stopped, step = stop, training.snapshots.best_step
        process_group.barrier()  # for its snapshot
        making.restore(config, options, parts, checkpoints.state_at(training.snapshots.folder, step))
        told = {"model_is": "the best step", "stopped": stop.problems[0].text}
        training.snapshots.tidy(parts.trainer.updates, at_the_end=True)
    save_models(config, parts, step)
    metrics = headline(config, parts)
    fields = {
        **tokenizers.token_fields(parts.tokenizer, parts.stop_token_id),
        "metrics": metrics,
        **told,
        "step": step,
        **training.snapshots.fields(),
        "trust_remote_code": options.trust_remote_code,
    }
    process_group.run_on_main(lambda: checkpoints.finish(config, identity, parents=parents, fields=fields))
    terminal.say(f"ppo      {reward(metrics, TRAINING)} ({UNPENALISED}), KL {metrics['objective/kl_k1']:.2f}")
    if stopped:
        raise _kept(stopped, config, step)


def _kept(stop: StopTraining, config: PPOConfig, step: int) -> RLHFError:
    """The error with what was kept in spite of it."""
    (problem,) = stop.problems
    kept = f"{checkpoints.shown(config.folder / 'model')} holds the best policy, of step {step}"
    return RLHFError(problem.code, problem.text, where=config.where(stop.key), hint=f"{problem.hint}; {kept}")


def headline(config: PPOConfig, parts: making.Parts) -> Stats:
    """Score, KL and length of the finished policy, over new responses to the run's first prompts."""
    asked = Prompts.from_lists([prompt.ids for prompt in parts.prompts[: config.ppo.episodes_per_update]])
    judged = parts.trainer.make_experience(parts.trainer.generate(asked, purpose="headline"))
    found = rollout_metrics(judged, kl_in_reward=config.ppo.kl_in == "reward")
    return {name: found[name] for name in HEADLINE}


def save_models(config: PPOConfig, parts: making.Parts, step: int) -> None:
    """model/ is the policy after `step`, value/ the value model: whole, or adapters of a base that they name."""
    policy, value = parts.policy, parts.value
    trained = f"{step} PPO updates of {config.ppo.episodes_per_update} episodes, KL coefficient {config.ppo.kl_coef}"
    saving.save_model(policy, parts.tokenizer, config.folder / "model", f"Policy after {trained}.")
    if isinstance(value, reading.ValueHead):
        head = value.score
        value = parts.base.with_head(policy, head) if parts.base else loading.scorer_around(policy, head)
    saving.save_model(value, parts.tokenizer, config.folder / "value", f"Value model after {trained}.")
