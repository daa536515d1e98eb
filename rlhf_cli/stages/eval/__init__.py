"""`rlhf eval`: have the policies answer held-out prompts, score the answers, report."""

from typing import Any

from rlhf_cli import checkpoints, data, rows, terminal, verdict
from rlhf_cli.config import EvalConfig, Options
from rlhf_cli.inputs import batches, machine, models
from rlhf_cli.inputs import eval as inputs
from rlhf_cli.models import devices, loading
from rlhf_cli.models.parallel import ProcessGroup, open_process_group
from rlhf_cli.report import write_beside
from rlhf_cli.report.frontier import draw as draw_frontier
from rlhf_cli.stages.eval import answers, report, tracked


def run(config: EvalConfig, options: Options) -> None:
    """Leave RUN/eval with report, samples and page, print the verdict, hold it against `eval.require`: R06.

    Raises RLHFError E04 and R14 as `ProcessGroup` does.
    """
    with open_process_group() as process_group:
        _run(config, options, process_group)


def _run(config: EvalConfig, options: Options, process_group: ProcessGroup) -> None:
    parents = checkpoints.open_parents(config)
    identity = checkpoints.identity(config, parents, config.sources())
    status = process_group.run_on_main(
        lambda: checkpoints.begin(config, identity, parents, fresh=options.fresh, device=devices.device_name())
    )
    if status == "finished":
        terminal.say(f"eval     finished already: {checkpoints.shown(config.folder)}")
        found = verdict.read_report(config.folder)
    else:
        found = _evaluate(config, options, parents, process_group)
        metrics = {"win_rate": found["win_rate"], "models": found["models"]}
        fields = {"metrics": metrics, "trust_remote_code": options.trust_remote_code}
        process_group.run_on_main(lambda: checkpoints.finish(config, identity, parents=parents, fields=fields))
    process_group.run_on_main(lambda: write_beside(config.folder))
    verdict.print_verdict(config.folder)
    verdict.check_requirements(found, config.eval.require, where=config.where)


def _evaluate(
    config: EvalConfig, options: Options, parents: dict[str, checkpoints.Parent], process_group: ProcessGroup
) -> dict[str, Any]:
    """Write samples.jsonl and report.json; returns the report. All ranks answer, rank 0 reports."""
    machine.check(config, parents)
    models.check_alike(config, options, parents)
    sft, ppo = parents["models.sft"], parents["models.ppo"]
    tokenizer = models.tokenizer(config, options, sft)
    sampling = inputs.sampling(config, inputs.trained_by(ppo), ppo.path, data.stop_token_id(tokenizer))
    body = loading.read_config(sft.model, options.trust_remote_code)
    with process_group.main_process_first():
        usable = inputs.read(config, tokenizer, body, sampling.response_length)
    if usable.left_out or len(usable) < config.eval.n:
        there = batches.counted(usable, "held-out prompts")
        terminal.say(f"eval     {there}; eval.n asks for {config.eval.n}")
    prompts = usable[: config.eval.n]
    inputs.warn_of_selection(config)
    trail = inputs.trail(config, ppo)
    judged = answers.collect(config, options, parents, tokenizer, prompts, sampling, trail, process_group)
    checkpoints.require_unchanged(parents)

    def write() -> dict[str, Any]:
        found = report.build(config, judged, len(prompts), sampling, parents, trail)
        if "frontier" in found:
            draw_frontier(found, config.folder / "frontier.svg")
        rows.write_jsonl(config.folder / "samples.jsonl", report.sample_rows(judged))
        checkpoints.write_json(config.folder / "report.json", found)
        tracked.tell(config, found, judged)  # what fails here is no part of the report
        return found

    return process_group.run_on_main(write)
