"""`rlhf run DIR`: the stages of a folder in order, like make. What is up to date is skipped, and every line says why.

Content decides, never dates. Each stage that runs is a child process; this one imports no torch.
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
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Selection:
    """Which stages a command line asks for: only these; from this one on; these again even if up to date."""

    only: tuple[str, ...] = ()
    start: str | None = None
    force: tuple[str, ...] = ()


@dataclass(frozen=True)
class Step:
    """What is to be done about one stage; `fresh` moves its old output aside first.

    `after` are earlier stages that run before it: it runs too if they change what it starts from, or if it is `new`.
    """

    why: str
    runs: bool
    fresh: bool
    after: tuple[str, ...] = ()


def run(folder: Path, overrides: Sequence[str], selection: Selection, options: Options) -> int:
    """Bring the stages of a folder up to date; returns 0, or the exit code of the stage that failed.

    Where more than the last stage has to run, `rlhf check` looks at everything first, in a child; its code is returned.
    Raises RLHFError for what is wrong before anything runs (C01-C17, D01, M01, M10), and R06 for an evaluation that
    is up to date but does not meet its requirements.
    """
    files = select(find_configs(folder), folder, selection)
    routed = route(overrides, list(files))
    try:
        configs = load_all(files, routed)
        refuse_what_is_missing(configs)
    except RLHFError as error:
        # Wrong beforehand, not just unreadable at this moment.
        whole = error.exit_code == 2 and not (options.dry_run or selection.only or selection.start)
        if whole and (code := _run_child(check_command(folder, overrides, options))):  # which tells all that is wrong
            return code
        raise
    if options.dry_run:
        for stage, step in forecast(configs, selection.force).items():
            terminal.out(f"{stage:<8} {step.why}")
        return 0
    last = list(configs.values())[-1]
    checked = bool(selection.only or selection.start)  # a part of a run is checked by its own stages
    for stage, config in configs.items():
        step = decide(config, selection.force)
        if step.runs and not checked and config is not last:
            checked = True
            terminal.say("run      checking configs, data and tokenizers of all stages first")
            if code := _run_child(check_command(folder, overrides, options)):
                return code
        terminal.out(f"{stage:<8} {step.why}")
        if step.runs:
            command = child_command(config, routed[stage], options, fresh=step.fresh)
            if code := _run_child(command):
                rest = "" if config is last else "; what comes after it was not run"
                terminal.say(f"{stage:<8} ended with exit code {code}{rest}")
                if isinstance(config, EvalConfig) and code == 1 and (config.folder / "manifest.json").is_file():
                    # It is done, and does not meet its requirements.
                    run_summary.show(folder, configs, routed, met=False)
                return code
        elif isinstance(config, EvalConfig):
            # What the stage itself shows, and holds against its requirements, when it runs.
            if not (config.folder / REPORT).exists():  # a kill came between the manifest and the page
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


def look(config: Config) -> StageStatus:
    """How a stage's output stands to its config, its data and its parents as they are now."""
    parents = runs.open_parents(config)
    return runs.stage_status(config, runs.compute_identity(config, parents, config.sources()))


def forecast(
    configs: Mapping[str, Config], force: Sequence[str] = (), look: Callable[[Config], StageStatus] = look
) -> dict[str, Step]:
    """What would run, and why. A stage behind one that would run can only be told once that one has run."""
    steps: dict[str, Step] = {}
    pending: dict[Path, str] = {}
    for stage, config in configs.items():
        waits = [pending[Path(one.path)] for one in runs.references(config) if Path(one.path) in pending]
        if waits:
            after, new = tuple(dict.fromkeys(waits)), not config.folder.exists()
            known = "new" if new else "runs again if that changes what it starts from"
            steps[stage] = Step(f"after {' and '.join(after)}: {known}", runs=new, fresh=False, after=after)
        else:
            steps[stage] = decide(config, force, look)
        if waits or steps[stage].runs:
            pending[config.folder] = stage
    return steps


def decide(config: Config, force: Sequence[str] = (), look: Callable[[Config], StageStatus] = look) -> Step:
    """Whether a stage has to run, as its config, its data and its parents are now, and why."""
    status = look(config)
    if config.stage in force and status.state != "new":
        return Step("forced to run again", runs=True, fresh=True)
    return Step(describe(status), runs=status.state != "finished", fresh=status.state in ("stale", "damaged"))


def describe(status: StageStatus) -> str:
    """Why a stage runs or is skipped, for the line that is printed."""
    if status.state == "finished":
        return f"up to date ({(status.sha256 or '')[:6]}), skipped"
    if status.state == "resume":
        return f"resumes at step {status.step}" if status.step is not None else "starts again (no step was saved)"
    more = len(status.reasons) - 3
    reasons = "; ".join(status.reasons[:3]) + (f"; and {more} more" if more > 0 else "")
    return f"{status.state}: {reasons}" if reasons else status.state


def preview(config: Config, *, fresh: bool) -> None:
    """Print a stage's resolved config as YAML on stdout, and in comments what it would read and write.

    A parent that an earlier stage of the run may still make is told; any other that is not there is an error.
    Raises D01, M01, M10.
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
    outcome = _outcome(config, parents, len(lines), fresh=fresh)
    terminal.out(yaml.safe_dump(config.dump(), sort_keys=False, allow_unicode=True).rstrip())
    for line in lines + [f"# reads   {key}: {', '.join(map(shown, paths))}" for key, paths in files.items()]:
        terminal.out(line)
    terminal.out(f"# writes  {shown(config.folder)}: {outcome}")


def _outcome(config: Config, parents: Mapping[str, Parent], wanted: int, *, fresh: bool) -> str:
    if len(parents) < wanted:
        return "once what it reads is ready"
    if fresh and config.folder.exists():
        return "new; the old folder moves to .old/"
    status = runs.stage_status(config, runs.compute_identity(config, parents, config.sources()))
    if status.state == "finished":
        return "it is finished, nothing to do"
    refused = "; needs --fresh" if status.state in ("stale", "damaged") else ""
    return describe(status) + refused


def find_configs(folder: Path) -> dict[str, Path]:
    """The configs of a run's folder by stage, in the order of the chain. Raises C09 where there are none."""
    if os.path.isfile(folder):
        stage = folder.stem if folder.stem in STAGES else STAGES[0]
        hint = f"for one stage: rlhf {stage} --config {shell_path(folder)}"
        raise RLHFError("C09", f"{shown(folder)} is a file, not the folder of a run", hint=hint)
    if not os.path.isdir(folder):
        near = closest_folder(folder)
        hint = f"did you mean {near}?" if near else f"rlhf init demo {shell_path(folder)} makes one"
        raise RLHFError("C09", f"no such folder: {shown(folder)}", hint=hint)
    found = {path.stem: path for path in configs_in(folder)}
    if not found:
        names = ", ".join(f"{stage}.yaml" for stage in STAGES)
        raise RLHFError("C09", f"{shown(folder)} holds none of {names}", hint="rlhf init --list shows ready ones")
    return found


def select(found: Mapping[str, Path], folder: Path, selection: Selection) -> dict[str, Path]:
    """The configs that a selection leaves. Raises C07 for a name that is no stage, C09 for one without a config."""
    named = [("--only", stage) for stage in selection.only] + [("--force", stage) for stage in selection.force]
    for option, stage in named + ([("--from", selection.start)] if selection.start else []):
        if stage not in STAGES:
            near = closest_match(stage, STAGES)
            hint = f"did you mean {near}?" if near else None
            raise RLHFError("C07", f"{option} {stage}: not one of {', '.join(STAGES)}", hint=hint)
        if stage not in found:
            hint = f"it holds {', '.join(path.name for path in found.values())}"
            raise RLHFError("C09", f"{option} {stage}: {shown(folder)} has no {stage}.yaml", hint=hint)
    if selection.only and selection.start:
        raise RLHFError("C17", "--only and --from contradict each other", hint="give one of the two")
    first = STAGES.index(selection.start) if selection.start else 0
    wanted = {stage: path for stage, path in found.items() if STAGES.index(stage) >= first}
    wanted = {stage: path for stage, path in wanted.items() if not selection.only or stage in selection.only}
    if left_out := [stage for stage in selection.force if stage not in wanted]:
        text = f"--force {left_out[0]} names a stage that --only or --from leaves out"
        raise RLHFError("C17", text, hint=f"{', '.join(wanted)} would run")
    return wanted


def route(overrides: Sequence[str], stages: Sequence[str]) -> dict[str, list[str]]:
    """Which stage gets which `--set`: the one that has the key, else its section; with `*.` in front, all that do.

    Raises C11 for what is no KEY=VALUE, and for a key that no stage or, without `*.`, more than one stage could mean.
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
            why = f"{section} is in {', '.join(f'{stage}.yaml' for stage in owners)}"
            problems.append(Problem("C11", why, f"--set {key}", hint))
        elif not owners:
            known = {name for stage in stages for name in CONFIGS[stage].model_fields}
            full = [path for stage in stages for path in keys(stage) if path.endswith(f".{key}")]
            near = next(iter(full), None) or closest_match(section, sorted(known))
            why = f"no stage that runs here ({', '.join(stages)}) has a section {section}"
            problems.append(Problem("C11", why, f"--set {key}", f"did you mean {near}?" if near else None))
        for stage in owners:
            routed[stage].append(text)
    if problems:
        raise RLHFError.from_problems(problems)
    return routed


def child_command(config: Config, overrides: Sequence[str], options: Options, *, fresh: bool) -> list[str]:
    """The command line that runs one stage in a process of its own."""
    command = [*RLHF_COMMAND, config.stage, "--config", str(config.file)]
    for text in overrides:
        command += ["--set", text]
    command += ["--nproc", options.nproc] if options.nproc else []
    flags = {"--fresh": fresh, "--trust-remote-code": options.trust_remote_code, "--debug": options.debug}
    return command + [flag for flag, is_set in flags.items() if is_set]


def check_command(folder: Path, overrides: Sequence[str], options: Options) -> list[str]:
    """The command line that looks at a whole folder: a fault of the last stage must not be found after hours."""
    sets = [word for text in overrides for word in ("--set", text)]
    flags = {"--trust-remote-code": options.trust_remote_code, "--debug": options.debug}
    flagged = [flag for flag, is_set in flags.items() if is_set]
    return [*RLHF_COMMAND, "check", str(folder), "--quiet", *sets, *flagged]


def load_all(files: Mapping[str, Path], routed: Mapping[str, Sequence[str]]) -> dict[str, Config]:
    """The configs of a run by stage. Raises RLHFError with the problems of all of them."""
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


def refuse_what_is_missing(configs: Mapping[str, Config], *, quick: bool = False) -> None:
    """What no stage of this run will make must be there now, not found missing after hours.

    A `quick` look fetches and reads nothing: not the hub's datasets, nor the weights of models that no stage made.
    Raises D01, M01, M04, M10.
    """
    checks: list[Callable[[], object]] = []
    made: tuple[Path, ...] = ()
    for config in configs.values():
        data = {key: one for key, one in config.sources().items() if not quick or sources.is_local(one)}
        checks.append(partial(sources.locate, data))
        checks.append(partial(runs.open_parents, config, made, hashed=not quick))
        made += (config.folder,)
    collect_errors(*checks)


def _run_child(command: Sequence[str]) -> int:
    """Run a child to its end, handing on the signals that reach us; returns its exit code, 128 + n after signal n.

    So too where the child was at its end already, and finished: what comes after it must not begin.

    The child has a process group of its own: Ctrl-C then reaches it once, through us, and it can save and end well.
    Should we be killed outright, it saves and ends too: nobody's child must not train on.
    """
    child: subprocess.Popen[bytes] | None = None
    heard: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        heard.append(number)
        if child is not None:
            child.send_signal(number)

    def pause(number: int, frame: FrameType | None) -> None:
        if child is not None:
            child.send_signal(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)  # here we sleep, until `fg`
        if child is not None:
            child.send_signal(signal.SIGCONT)

    forwarded = [number for number in FORWARDED if not is_nohup(number)]
    handlers = {**dict.fromkeys(forwarded, forward), signal.SIGTSTP: pause}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        child = subprocess.Popen(command, process_group=0, preexec_fn=partial(die_with_parent, os.getpid()))
        for number in list(heard):
            child.send_signal(number)
        code = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if code == 0 and heard:
        return 128 + heard[0]
    return code if code >= 0 else 128 - code
