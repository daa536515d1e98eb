"""`rlhf run DIR`: run the stages of a folder, each in a child process, and skip those that are up to date by hash."""

import os
import signal
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType

import yaml

from rlhf_cli import runs, terminal
from rlhf_cli.commands.report import show
from rlhf_cli.config.base import Config, Options
from rlhf_cli.config.eval import EvalConfig
from rlhf_cli.config.machinery.loading import accepts_key, check_override, keys, load
from rlhf_cli.config.stages import CONFIGS
from rlhf_cli.data import sources
from rlhf_cli.distributed import RLHF_COMMAND
from rlhf_cli.errors import (
    Problem,
    RLHFError,
    closest_match,
    closest_path,
    collect_errors,
    did_you_mean,
    shell_path,
    shell_word,
    shown,
)
from rlhf_cli.evaluation.print_report import print_report
from rlhf_cli.evaluation.requirements import check_requirements
from rlhf_cli.runs.discover import STAGES, configs_in
from rlhf_cli.runs.parents import Parent
from rlhf_cli.runs.report import read_report
from rlhf_cli.runs.status import REPORT, StageStatus
from rlhf_cli.system import die_with_parent, is_nohup

FORWARDED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class StageDecision:
    """Decision to run or skip one stage."""

    reason: str
    runs: bool
    fresh: bool  # its old output is moved to .old/ first
    after: tuple[str, ...] = ()  # earlier stages that run first; the stage then runs too if they change its inputs


def run(
    folder: Path,
    overrides: Sequence[str],
    options: Options,
    only: Sequence[str] = (),
    start: str | None = None,
    force: Sequence[str] = (),
) -> int:
    """Bring the stages of a folder up to date; return 0, or the exit code of the stage that failed.

    `only`, `start` and `force` are the options --only, --from and --force. If any stage but the last has to run,
    `rlhf check` of the whole folder runs first; its exit code is returned if it fails. Raises RLHFError C01-C17, D01,
    M01, M10 before anything runs, R06 for an unmet requirement of an evaluation.
    """
    files = select_stages(find_configs(folder), folder, only, start, force)
    routed = route_overrides(overrides, list(files))
    try:
        configs = load_all(files, routed)
        check_inputs_exist(configs)
    except RLHFError as error:
        is_full_run = not (options.dry_run or only or start)
        # an error that is not of a file which cannot be read now: `rlhf check` reports all problems
        if is_full_run and error.exit_code == 2 and (code := _run_child(check_command(folder, overrides, options))):
            return code
        raise
    if options.dry_run:
        for stage, decision in plan_stages(configs, force).items():
            terminal.out(f"{stage:<8} {decision.reason}")
        return 0
    last = list(configs.values())[-1]
    checked = bool(only or start)  # selected stages check themselves
    for stage, config in configs.items():
        decision = decide_stage(stage_status(config), forced=stage in force)
        if decision.runs and not checked and config is not last:
            checked = True
            terminal.say("run      checking configs, data and tokenizers of all stages first")
            if code := _run_child(check_command(folder, overrides, options)):
                return code
        terminal.out(f"{stage:<8} {decision.reason}")
        if decision.runs and (code := _run_child(child_command(config, routed[stage], options, fresh=decision.fresh))):
            skipped = "" if config is last else "; what comes after it was not run"
            terminal.say(f"{stage:<8} ended with exit code {code}{skipped}")
            if isinstance(config, EvalConfig) and code == 1 and (config.folder / "manifest.json").is_file():
                # The evaluation is complete but does not meet its requirements.
                show_summary(folder, configs, routed, met=False)
            return code
        if isinstance(config, EvalConfig) and not decision.runs:
            try:
                if not (config.folder / REPORT).exists():  # killed between writing the manifest and the HTML report
                    show.write_beside(config.folder)
                print_report(config.folder)
                check_requirements(read_report(config.folder), config.eval.require, where=config.where)
            except RLHFError:
                show_summary(folder, configs, routed, met=False)
                raise
    show_summary(folder, configs, routed)
    return 0


def stage_status(config: Config) -> StageStatus:
    """Compare a stage's output with its config, data and parents as they are now."""
    return runs.stage_status(config, runs.compute_identity(config, runs.open_parents(config), config.sources()))


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
            reason = "new" if new else "runs again if that changes what it starts from"
            decisions[stage] = StageDecision(f"after {' and '.join(after)}: {reason}", new, fresh=False, after=after)
        else:
            decisions[stage] = decide_stage(get_status(config), forced=stage in force)
        if after or decisions[stage].runs:
            pending[config.folder] = stage
    return decisions


def decide_stage(status: StageStatus, *, forced: bool) -> StageDecision:
    """Decide if a stage has to run, by its status."""
    if forced and status.state != "new":
        return StageDecision("forced to run again", runs=True, fresh=True)
    fresh = status.state in ("stale", "damaged")
    return StageDecision(describe_status(status), runs=status.state != "finished", fresh=fresh)


def describe_status(status: StageStatus) -> str:
    """Return the reason why a stage runs or is skipped, as printed."""
    if status.state == "finished":
        return f"up to date ({(status.sha256 or '')[:6]}), skipped"
    if status.state == "resume":
        return f"resumes at step {status.step}" if status.step is not None else "starts again (no step was saved)"
    more = [f"and {len(status.reasons) - 3} more"] if len(status.reasons) > 3 else []
    return ": ".join(filter(None, (status.state, "; ".join([*status.reasons[:3], *more]))))


def preview(config: Config, *, fresh: bool) -> None:
    """Print a stage's resolved config as YAML on stdout, with its inputs and outputs as comments.

    A missing parent is an error unless an earlier stage of the run can still make it. Raises D01, M01, M10.
    """
    files = sources.locate(config.sources())
    parents: dict[str, Parent] = {}
    lines = []
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
    if len(parents) < len(lines):
        outcome = "once what it reads is ready"
    elif fresh and config.folder.exists():
        outcome = "new; the old folder moves to .old/"
    else:
        status = runs.stage_status(config, runs.compute_identity(config, parents, config.sources()))
        needs_fresh = "; needs --fresh" if status.state in ("stale", "damaged") else ""
        finished = "it is finished, nothing to do"
        outcome = finished if status.state == "finished" else describe_status(status) + needs_fresh
    terminal.out(yaml.safe_dump(config.dump(), sort_keys=False, allow_unicode=True).rstrip())
    for line in lines + [f"# reads   {key}: {', '.join(map(shown, paths))}" for key, paths in files.items()]:
        terminal.out(line)
    terminal.out(f"# writes  {shown(config.folder)}: {outcome}")


def find_configs(folder: Path) -> dict[str, Path]:
    """Return the configs of a run folder by stage, in the order of the chain. Raises C09 if there are none."""
    if os.path.isfile(folder):
        hint = f"for one stage: rlhf {folder.stem if folder.stem in STAGES else 'sft'} --config {shell_path(folder)}"
        raise RLHFError("C09", f"{shown(folder)} is a file, not the folder of a run", hint=hint)
    if not os.path.isdir(folder):
        near = closest_path(folder, is_candidate=os.path.isdir)
        hint = f"did you mean {near}?" if near else f"rlhf init demo {shell_path(folder)} makes one"
        raise RLHFError("C09", f"no such folder: {shown(folder)}", hint=hint)
    files = {path.stem: path for path in configs_in(folder)}
    if not files:
        text = f"{shown(folder)} holds none of {', '.join(f'{stage}.yaml' for stage in STAGES)}"
        raise RLHFError("C09", text, hint="rlhf init --list shows ready ones")
    return files


def select_stages(
    files: Mapping[str, Path], folder: Path, only: Sequence[str], start: str | None, force: Sequence[str]
) -> dict[str, Path]:
    """Return the selected configs by stage. Raises C07 for an unknown stage, C09 for a stage without a config."""
    options = {"--only": only, "--force": force, "--from": (start,) if start else ()}
    for option, stage in [(option, stage) for option, stages in options.items() for stage in stages]:
        if stage not in STAGES:
            text = f"{option} {stage}: not one of {', '.join(STAGES)}"
            raise RLHFError("C07", text, hint=did_you_mean(stage, STAGES))
        if stage not in files:
            hint = f"it holds {', '.join(path.name for path in files.values())}"
            raise RLHFError("C09", f"{option} {stage}: {shown(folder)} has no {stage}.yaml", hint=hint)
    if only and start:
        raise RLHFError("C17", "--only and --from contradict each other", hint="give one of the two")
    names = only or STAGES[STAGES.index(start) if start else 0 :]
    selected = {stage: path for stage, path in files.items() if stage in names}
    if excluded := [stage for stage in force if stage not in selected]:
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
            near = next(iter(paths), None) or closest_match(section, sorted(known))
            reason = f"no stage that runs here ({', '.join(stages)}) has a section {section}"
            problems.append(Problem("C11", reason, f"--set {key}", f"did you mean {near}?" if near else None))
        for stage in owners:
            routed[stage].append(text)
    if problems:
        raise RLHFError.from_problems(problems)
    return routed


def child_command(config: Config, overrides: Sequence[str], options: Options, *, fresh: bool) -> list[str]:
    """Return the command line that runs one stage in a child process."""
    processes = ["--nproc", options.nproc] if options.nproc else []
    words = [config.stage, "--config", str(config.file), *processes, *["--fresh"] * fresh]
    return [*RLHF_COMMAND, *words, *_options(overrides, options)]


def check_command(folder: Path, overrides: Sequence[str], options: Options) -> list[str]:
    """Return the command line that checks all stages of a folder before the first one trains."""
    return [*RLHF_COMMAND, "check", str(folder), "--quiet", *_options(overrides, options)]


def _options(overrides: Sequence[str], options: Options) -> list[str]:
    flags = ["--trust-remote-code"] * options.trust_remote_code + ["--debug"] * options.debug
    return [word for text in overrides for word in ("--set", text)] + flags


def load_valid(
    files: Iterable[Path], routed: Mapping[str, Sequence[str]]
) -> tuple[dict[str, Config], dict[Problem, None]]:
    """Return the valid configs by stage, and the problems of the others as an ordered set."""
    configs: dict[str, Config] = {}
    problems: dict[Problem, None] = {}
    for path in files:
        try:
            configs[path.stem] = load(path.stem, path, routed.get(path.stem, ()))
        except RLHFError as error:
            problems |= dict.fromkeys(error.problems)
    return configs, problems


def load_all(files: Mapping[str, Path], routed: Mapping[str, Sequence[str]]) -> dict[str, Config]:
    """Load the configs of a run by stage. Raises RLHFError with the problems of all of them."""
    configs, problems = load_valid(files.values(), routed)
    if problems:
        raise RLHFError.from_problems(list(problems))
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

    After a signal the next stage does not start, even if the child had finished. The child has its own process group:
    Ctrl-C reaches it once, through the parent. If the parent is killed, the child is signalled, saves and exits.
    """
    child: subprocess.Popen[bytes] | None = None
    received: list[int] = []

    def send(number: int) -> None:
        if child is not None:
            child.send_signal(number)

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        send(number)

    def pause(number: int, frame: FrameType | None) -> None:
        send(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)  # returns after `fg`
        send(signal.SIGCONT)

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


def show_summary(
    folder: Path, configs: Mapping[str, Config], overrides: Mapping[str, Sequence[str]], *, met: bool = True
) -> None:
    """Print the end of a run: the report's headline, next commands, and overrides that no config file has.

    `overrides` are those of each stage; `met`: the evaluation meets its requirements.
    """
    commands = []
    if "eval" in configs:
        evaluation = configs["eval"].folder
        if (evaluation / REPORT).is_file():
            headline, is_suspect = show.brief(evaluation)
            terminal.out(f"the page says: {headline}")
            if not met or is_suspect:
                commands.append(f"open {shell_path(evaluation / REPORT)} in a browser")
        if met and "ppo" in configs:
            has_selected = read_report(evaluation).selected_step is not None
            step = " --step selected" if has_selected else ""
            commands.append(f"rlhf chat {shell_path(folder)} --compare sft,ppo")
            commands.append(f"rlhf export {shell_path(folder)} --out DIR{step}")
    if commands:
        terminal.out(f"next: {'; '.join(commands)}")
    for stage, config in configs.items():
        if _is_changed_by(overrides[stage], config):
            options = " ".join(f"-s {shell_word(text)}" for text in overrides[stage])
            text = f"{stage} used {options}: add it to {shown(config.file)}, or a plain "
            terminal.out(f"{text}`rlhf run {shell_path(folder)}` runs {stage} again")


def _is_changed_by(overrides: Sequence[str], config: Config) -> bool:
    """Return True if overrides change the result of a stage whose file is valid without them."""
    try:
        return bool(overrides) and load(config.stage, config.file).identity() != config.identity()
    except RLHFError:  # `rlhf run` will report why
        return False
