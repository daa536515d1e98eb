"""`rlhf ppo`: load the models and prompts, loop over updates, save the policy."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from rlhf_cli import runs, terminal
from rlhf_cli.config.base import Options
from rlhf_cli.config.ppo import PPOConfig, scale_to_world_size
from rlhf_cli.errors import RLHFError
from rlhf_cli.evaluation import reward_card
from rlhf_cli.evaluation.report_text import TRAINING, UNPENALISED, format_reward
from rlhf_cli.models import build, forward, load, lora, save
from rlhf_cli.models.batch import Prompts
from rlhf_cli.ppo.experience import Stats
from rlhf_cli.ppo.monitor import StopTraining
from rlhf_cli.stages.common import lifecycle
from rlhf_cli.stages.ppo import reward_judges, rollout_engine, setup
from rlhf_cli.stages.ppo.runner import PPORunner

FINAL_METRICS = ("objective/scores", "objective/kl_k1", "objective/response_length", "objective/eos_fraction")


def run(config: PPOConfig, options: Options) -> None:
    """Train a policy by PPO and write RUN/ppo; resume from the last checkpoint if there is one.

    If ppo.kl_stop or the watchdog stops the run, RUN/ppo is completed with the best policy so far, and R04 or R13 is
    raised. Raises M05 if that policy's snapshot is corrupt, and as `lifecycle.run_stage`.
    """
    lifecycle.run_stage(config, options, _train, check=partial(reward_card.check_required, config))


def _train(config: PPOConfig, stage: lifecycle.StageRun) -> None:
    config = scale_to_world_size(config, stage.process_group.world_size)  # batch sizes are of all ranks from here on
    components = setup.load_components(config, stage.options, stage.parents, stage.process_group)
    rollout_engine.set_rollout_rows(config, stage.parents, components.trainer, components.prompts)
    rewards = components.trainer.rewards.values()
    reward_judges.check_calls_of_run(config, len(components.prompts))
    stage.process_group.run_on_main(lambda: reward_judges.pass_probes(rewards))
    fields = lifecycle.manifest_fields(components.prompts, components.tokenizer, components.stop_token_id)
    stage.begin_training()

    runner = PPORunner(config, components)
    runner.restore(stage)
    outcome = _run_updates(config, stage, runner)

    with components.trainer.averaged_policy():  # changes nothing after an early stop: a snapshot is averaged already
        _save_policy(config, components, outcome.policy_step)
        metrics = _measure_final_policy(config, components)
    if outcome.stopped is None:  # snapshots have no value model
        _save_value_model(config, components)

    stage.complete(
        {
            **fields,
            "metrics": metrics,
            "engine": getattr(components.trainer.engine, "name", None),
            **outcome.manifest_fields(),
            **runner.snapshots.manifest_fields(),
        }
    )
    stage.process_group.run_on_main(lambda: reward_judges.say_costs(rewards))
    terminal.say(f"ppo      {format_reward(metrics, TRAINING)} ({UNPENALISED}), KL {metrics['objective/kl_k1']:.2f}")
    if outcome.stopped:
        raise _stop_error(config, outcome.stopped, outcome.policy_step)


@dataclass(frozen=True)
class Outcome:
    """How the updates ended: after the last one, or stopped early with the policy of the best step."""

    policy_step: int
    stopped: StopTraining | None = None

    def manifest_fields(self) -> dict[str, Any]:
        """Return the manifest's fields about the policy's step."""
        if self.stopped is None:
            return {"model_is": "the last step", "step": self.policy_step}
        reason = self.stopped.problems[0].text
        return {"model_is": "the best step", "stopped": reason, "step": self.policy_step}


def _run_updates(config: PPOConfig, stage: lifecycle.StageRun, runner: PPORunner) -> Outcome:
    """Make the remaining updates; if the run is stopped, give the policy the weights of the best step."""
    components = runner.components
    try:
        runner.run()
    except StopTraining as stop:
        step = runner.snapshots.best_step
        stage.process_group.barrier()  # until the first rank has written the snapshot
        snapshot = runs.state_at(runner.snapshots.folder, step)
        setup.restore_policy(config, stage.options, components, snapshot)
        runner.snapshots.prune(components.trainer.updates, finished=True)
        return Outcome(step, stop)
    return Outcome(components.num_updates)


def _save_policy(config: PPOConfig, components: setup.PPOComponents, step: int) -> None:
    """Save the policy after `step` to model/: full weights, or adapters of a base."""
    average = f" with averaged weights (decay {config.ppo.average:g} an update)" if config.ppo.average else ""
    card = f"Policy{average} after {_describe_training(config, step)}."
    save.save_trained(components.policy, components.tokenizer, config.folder / "model", card)


def _save_value_model(config: PPOConfig, components: setup.PPOComponents) -> None:
    """Save the value model, if there is one, to value/: full weights, or adapters of a base.

    A value head is saved as a sequence classifier, and not at all if the policy's family has none.
    """
    value = _value_to_save(components)
    if value is not None:
        card = f"Value model after {_describe_training(config, components.num_updates)}."
        save.save_trained(value, components.tokenizer, config.folder / "value", card)


def _describe_training(config: PPOConfig, step: int) -> str:
    """Return the training in words, with the KL coefficient at its start."""
    settings = config.ppo
    return f"{step} PPO updates of {settings.episodes_per_update} episodes, KL coefficient {settings.kl_coef}"


def _value_to_save(components: setup.PPOComponents) -> Any:
    """Return the value model; a value head on the trained policy: it has learned from the policy's hidden states."""
    policy = components.policy
    value = components.value
    if not isinstance(value, forward.ValueHead):
        return value
    if not build.scores_by_one_matrix(lora.unwrap(policy).config):
        reason = "transformers has no classifier of the policy's family that scores by one matrix"
        terminal.say(f"ppo      value/ is not written: {reason}")
        return None
    if components.base:
        return components.base.value_from_head(policy, value.score)
    return load.reward_model_from_backbone(policy, value.score)


def _measure_final_policy(config: PPOConfig, components: setup.PPOComponents) -> Stats:
    """Compute score, KL and length of the finished policy on new responses to the run's first prompts."""
    trainer = components.trainer
    prompts = Prompts.of(components.prompts[: config.ppo.episodes_per_update])
    rollout = trainer.generate(prompts, purpose="headline")  # its name is part of the seed
    experience = trainer.make_experience(rollout)
    metrics = experience.metrics(kl_in_reward=config.ppo.kl_in_reward)
    return {name: metrics[name] for name in FINAL_METRICS}


def _stop_error(config: PPOConfig, stopped: StopTraining, step: int) -> RLHFError:
    """Return the error of a run that was stopped and has kept its best policy."""
    problem = stopped.problems[0]
    kept = f"{runs.shown(config.folder / 'model')} holds the best policy, of step {step}"
    return RLHFError(
        problem.code,
        problem.text,
        where=config.where(stopped.key),
        hint=f"{problem.hint}; {kept}",
    )
