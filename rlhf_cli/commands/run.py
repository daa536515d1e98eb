"""`rlhf run DIR`: run the stages of a folder in order, like make, and skip those that are up to date.

Hashes of content decide, never dates. Each stage runs in a child process; the parent imports no torch.
"""

import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType

import yaml

from rlhf_cli import runs, terminal
from rlhf_cli.commands import run_summary
from rlhf_cli.commands.report import write_beside
from rlhf_cli.config.base import Config, Options
from rlhf_cli.config.eval import EvalConfig
from rlhf_cli.config.loading import accepts_key, check_override, keys, load
from rlhf_cli.config.training import CONFIGS
from rlhf_cli.data import sources
from rlhf_cli.distributed import RLHF_COMMAND
from rlhf_cli.errors import Problem, RLHFError, closest_folder, closest_match, collect_errors, shell_path, shown
from rlhf_cli.evaluation import render
from rlhf_cli.runs.discover import configs_in
from rlhf_cli.runs.parents import Parent
from rlhf_cli.runs.stage_folder import REPORT, StageStatus
from rlhf_cli.system import die_with_parent, is_nohup

STAGES = tuple(CONFIGS)  # in the order of the chain
FORWARDED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class StageFilter:
    """Stages selected on the command line: `--only`, `--from` and `--force`."""

    only: tuple[str, ...] = ()
    start: str | None = None
    force: tuple[str, ...] = ()


@dataclass(frozen=True)
class StageDecision:
    """Decision to run or skip one stage. `fresh` moves its old output to .old/ first.

    `after` names earlier stages that run first; the stage then runs too if they change its inputs.
    """

    reason: str
    runs: bool
    fresh: bool
    after: tuple[str, ...] = ()


def run(folder: Path, overrides: Sequence[str], stage_filter: StageFilter, options: Options) -> int:
    """Bring the stages of a folder up to date; return 0, or the exit code of the stage that failed.

    If any stage but the last has to run, `rlhf check` runs on the whole folder first, and its exit code is returned if
    it fails. Raises RLHFError C01-C17, D01, M01, M10 before anything runs, and R06 if an evaluation is up to date but
    does not meet its requirements.
    """
    files = select_stages(find_configs(folder), folder, stage_filter)
    routed = route_overrides(overrides, list(files))
    try:
        configs = load_all(files, routed)
        check_inputs_exist(configs)
    except RLHFError as error:
        is_full_run = not (options.dry_run or stage_filter.only or stage_filter.start)
        check = is_full_run and error.exit_code == 2  # not for a passing read error
        if check and (code := _run_child(check_command(folder, overrides, options))):  # reports all problems
            return code
        raise
    if options.dry_run:
        for stage, decision in plan_stages(configs, stage_filter.force).items():
            terminal.out(f"{stage:<8} {decision.reason}")
        return 0
    last = list(configs.values())[-1]
    checked = bool(stage_filter.only or stage_filter.start)  # selected stages check themselves
    for stage, config in configs.items():
        decision = decide_stage(config, stage_filter.force)
        if decision.runs and not checked and config is not last:
            checked = True
            terminal.say("run      checking configs, data and tokenizers of all stages first")
            if code := _run_child(check_command(folder, overrides, options)):
                return code
        terminal.out(f"{stage:<8} {decision.reason}")
        if decision.runs:
            command = child_command(config, routed[stage], options, fresh=decision.fresh)
            if code := _run_child(command):
                skipped = "" if config is last else "; what comes after it was not run"
                terminal.say(f"{stage:<8} ended with exit code {code}{skipped}")
                if isinstance(config, EvalConfig) and code == 1 and (config.folder / "manifest.json").is_file():
                    # The evaluation is complete but does not meet its requirements.
                    run_summary.show(folder, configs, routed, met=False)
                return code
        elif isinstance(config, EvalConfig):
            # Print and check the up-to-date evaluation as the stage does.
            if not (config.folder / REPORT).exists():  # killed between writing the manifest and the HTML report
                write_beside(config.folder)
            render.print_report(config.folder)
            report = render.read_report(config.folder)
            try:
                render.check_requirements(report, config.eval.require, where=config.where)
            except RLHFError:
                run_summary.show(folder, configs, routed, met=False)
                raise
    run_summary.show(folder, configs, routed)
    return 0


def stage_status(config: Config) -> StageStatus:
    """Compare a stage's output with its config, data and parents as they are now."""
    parents = runs.open_parents(config)
    return runs.stage_status(config, runs.compute_identity(config, parents, config.sources()))


def plan_stages(
    configs: Mapping[str, Config], force: Sequence[str] = (), get_status: Callable[[Config], StageStatus] = stage_status
) -> dict[str, StageDecision]:
    """Return the decision on each stage. Those after a stage that would run depend on its result."""
    decisions: dict[str, StageDecision] = {}
    pending: dict[Path, str] = {}
    for stage, config in configs.items():
        paths = [Path(reference.path) for reference in runs.references(config)]
        if after := tuple(dict.fromkeys(pending[path] for path in paths if path in pending)):
            new = not config.folder.exists()
            condition = "new" if new else "runs again if that changes what it starts from"
            reason = f"after {' and '.join(after)}: {condition}"
            decisions[stage] = StageDecision(reason, runs=new, fresh=False, after=after)
        else:
            decisions[stage] = decide_stage(config, force, get_status)
        if after or decisions[stage].runs:
            pending[config.folder] = stage
    return decisions


def decide_stage(
    config: Config, force: Sequence[str] = (), get_status: Callable[[Config], StageStatus] = stage_status
) -> StageDecision:
    """Decide if a stage has to run, from its config, data and parents as they are now."""
    status = get_status(config)
    if config.stage in force and status.state != "new":
        return StageDecision("forced to run again", runs=True, fresh=True)
    fresh = status.state in ("stale", "damaged")
    return StageDecision(describe_status(status), runs=status.state != "finished", fresh=fresh)


def describe_status(status: StageStatus) -> str:
    """Return the reason why a stage runs or is skipped, as printed."""
    if status.state == "finished":
        return f"up to date ({(status.sha256 or '')[:6]}), skipped"
    if status.state == "resume":
        return f"resumes at step {status.step}" if status.step is not None else "starts again (no step was saved)"
    more = len(status.reasons) - 3
    reasons = "; ".join(status.reasons[:3]) + (f"; and {more} more" if more > 0 else "")
    return f"{status.state}: {reasons}" if reasons else status.state


def preview(config: Config, *, fresh: bool) -> None:
    """Print a stage's resolved config as YAML on stdout, with its inputs and outputs as comments.

    A missing parent is an error unless an earlier stage of the run can still make it. Raises D01, M01, M10.
    """
    files = sources.locate(config.sources())
    parents: dict[str, Parent] = {}
    lines: list[str] = []
    for reference in runs.references(config):
        path = Path(reference.path)
        try:
            parent = parents[reference.key] = runs.open_reference(config, reference)
            lines.append(f"# reads   {reference.key}: {shown(parent.path)} ({parent.stage}, {parent.sha256[:6]})")
        except RLHFError as error:
            earlier = [Path(config.run) / stage for stage in reference.expect]
            if path not in earlier or (path / "manifest.json").exists():
                raise
            lines.append(f"# reads   {reference.key}: not ready: {error.problems[0].text}")
    outcome = _describe_outcome(config, parents, len(lines), fresh=fresh)
    terminal.out(yaml.safe_dump(config.dump(), sort_keys=False, allow_unicode=True).rstrip())
    for line in lines + [f"# reads   {key}: {', '.join(map(shown, paths))}" for key, paths in files.items()]:
        terminal.out(line)
    terminal.out(f"# writes  {shown(config.folder)}: {outcome}")


def _describe_outcome(config: Config, parents: Mapping[str, Parent], num_parents: int, *, fresh: bool) -> str:
    if len(parents) < num_parents:
        return "once what it reads is ready"
    if fresh and config.folder.exists():
        return "new; the old folder moves to .old/"
    status = runs.stage_status(config, runs.compute_identity(config, parents, config.sources()))
    if status.state == "finished":
        return "it is finished, nothing to do"
    return describe_status(status) + ("; needs --fresh" if status.state in ("stale", "damaged") else "")


def find_configs(folder: Path) -> dict[str, Path]:
    """Return the configs of a run folder by stage, in the order of the chain. Raises C09 if there are none."""
    if os.path.isfile(folder):
        stage = folder.stem if folder.stem in STAGES else STAGES[0]
        hint = f"for one stage: rlhf {stage} --config {shell_path(folder)}"
        raise RLHFError("C09", f"{shown(folder)} is a file, not the folder of a run", hint=hint)
    if not os.path.isdir(folder):
        near = closest_folder(folder)
        hint = f"did you mean {near}?" if near else f"rlhf init demo {shell_path(folder)} makes one"
        raise RLHFError("C09", f"no such folder: {shown(folder)}", hint=hint)
    files = {path.stem: path for path in configs_in(folder)}
    if not files:
        names = ", ".join(f"{stage}.yaml" for stage in STAGES)
        raise RLHFError("C09", f"{shown(folder)} holds none of {names}", hint="rlhf init --list shows ready ones")
    return files


def select_stages(files: Mapping[str, Path], folder: Path, stage_filter: StageFilter) -> dict[str, Path]:
    """Return the selected configs by stage. Raises C07 for an unknown stage, C09 for a stage without a config."""
    named = [("--only", stage) for stage in stage_filter.only] + [("--force", stage) for stage in stage_filter.force]
    for option, stage in named + ([("--from", stage_filter.start)] if stage_filter.start else []):
        if stage not in STAGES:
            near = closest_match(stage, STAGES)
            hint = f"did you mean {near}?" if near else None
            raise RLHFError("C07", f"{option} {stage}: not one of {', '.join(STAGES)}", hint=hint)
        if stage not in files:
            hint = f"it holds {', '.join(path.name for path in files.values())}"
            raise RLHFError("C09", f"{option} {stage}: {shown(folder)} has no {stage}.yaml", hint=hint)
    if stage_filter.only and stage_filter.start:
        raise RLHFError("C17", "--only and --from contradict each other", hint="give one of the two")
    first = STAGES.index(stage_filter.start) if stage_filter.start else 0
    selected = {stage: path for stage, path in files.items() if STAGES.index(stage) >= first}
    selected = {stage: path for stage, path in selected.items() if not stage_filter.only or stage in stage_filter.only}
    if excluded := [stage for stage in stage_filter.force if stage not in selected]:
        text = f"--force {excluded[0]} names a stage that --only or --from leaves out"
        raise RLHFError("C17", text, hint=f"{', '.join(selected)} would run")
    return selected


def route_overrides(overrides: Sequence[str], stages: Sequence[str]) -> dict[str, list[str]]:
    """Assign each `--set` to the stage that has the key, else its section; with a leading `*.` to all that do.

    Raises C11 for text that is not KEY=VALUE, an unknown section, and a key of several stages without `*.`.
    """
    routed: dict[str, list[str]] = {stage: [] for stage in stages}
    problems = []
    for text in overrides:
        if problem := check_override(text):
            problems.append(problem)
            continue
        key = text.partition("=")[0].strip()
        section = key.removeprefix("*.").partition(".")[0]
        owners = [stage for stage in stages if section in CONFIGS[stage].model_fields]
        owners = [stage for stage in owners if accepts_key(stage, key)] or owners
        if len(owners) > 1 and not key.startswith("*."):
            hint = f"-s '*.{text}' sets it in all of them; for one, change its file"
            reason = f"{section} is in {', '.join(f'{stage}.yaml' for stage in owners)}"
            problems.append(Problem("C11", reason, f"--set {key}", hint))
        elif not owners:
            known = {name for stage in stages for name in CONFIGS[stage].model_fields}
            paths = [path for stage in stages for path in keys(stage) if path.endswith(f".{key}")]
            suggestion = next(iter(paths), None) or closest_match(section, sorted(known))
            reason = f"no stage that runs here ({', '.join(stages)}) has a section {section}"
            problems.append(
                Problem("C11", reason, f"--set {key}", f"did you mean {suggestion}?" if suggestion else None)
            )
        for stage in owners:
            routed[stage].append(text)
    if problems:
        raise RLHFError.from_problems(problems)
    return routed


def child_command(config: Config, overrides: Sequence[str], options: Options, *, fresh: bool) -> list[str]:
    """Return the command line that runs one stage in a child process."""
    command = [*RLHF_COMMAND, config.stage, "--config", str(config.file)]
    for text in overrides:
        command += ["--set", text]
    command += ["--nproc", options.nproc] if options.nproc else []
    flags = {"--fresh": fresh, "--trust-remote-code": options.trust_remote_code, "--debug": options.debug}
    return command + [flag for flag, is_set in flags.items() if is_set]


def check_command(folder: Path, overrides: Sequence[str], options: Options) -> list[str]:
    """Return the command line that checks all stages of a folder before the first one trains."""
    sets = [word for text in overrides for word in ("--set", text)]
    flags = {"--trust-remote-code": options.trust_remote_code, "--debug": options.debug}
    flagged = [flag for flag, is_set in flags.items() if is_set]
    return [*RLHF_COMMAND, "check", str(folder), "--quiet", *sets, *flagged]


def load_all(files: Mapping[str, Path], routed: Mapping[str, Sequence[str]]) -> dict[str, Config]:
    """Load the configs of a run by stage. Raises RLHFError with the problems of all of them."""
    configs: dict[str, Config] = {}
    problems: list[Problem] = []
    for stage, path in files.items():
        try:
            configs[stage] = load(stage, path, routed[stage])
        except RLHFError as error:
            problems += error.problems
    if problems:
        raise RLHFError.from_problems(problems)
    return configs


def check_inputs_exist(configs: Mapping[str, Config], *, quick: bool = False) -> None:
    """Check that data and models exist, except those that an earlier stage of this run makes.

    With `quick`, hub datasets are not fetched and weights of external models are not hashed.
    Raises D01, M01, M04, M10.
    """
    checks: list[Callable[[], object]] = []
    outputs: tuple[Path, ...] = ()
    for config in configs.values():
        data = {key: source for key, source in config.sources().items() if not quick or sources.is_local(source)}
        checks.append(partial(sources.locate, data))
        checks.append(partial(runs.open_parents, config, outputs, hashed=not quick))
        outputs += (config.folder,)
    collect_errors(*checks)


def _run_child(command: Sequence[str]) -> int:
    """Run a child process, forwarding signals to it; return its exit code, or 128 + n after signal n.

    128 + n is also returned if the child had finished by then, so that the next stage does not start.
    The child has its own process group: Ctrl-C reaches it once, through the parent, and it can save a checkpoint.
    If the parent is killed, the child is signalled and also saves and exits.
    """
    child: subprocess.Popen[bytes] | None = None
    received: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if child is not None:
            child.send_signal(number)

    def pause(number: int, frame: FrameType | None) -> None:
        if child is not None:
            child.send_signal(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)  # returns after `fg`
        if child is not None:
            child.send_signal(signal.SIGCONT)

    forwarded = [number for number in FORWARDED_SIGNALS if not is_nohup(number)]
    handlers = {**dict.fromkeys(forwarded, forward), signal.SIGTSTP: pause}
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        child = subprocess.Popen(command, process_group=0, preexec_fn=partial(die_with_parent, os.getpid()))
        for number in list(received):
            child.send_signal(number)
        code = child.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if code == 0 and received:
        return 128 + received[0]
    return code if code >= 0 else 128 - code
