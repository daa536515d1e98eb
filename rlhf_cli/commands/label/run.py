"""`rlhf label`: draw candidates, then let people or a judge compare them."""

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rlhf_cli import terminal
from rlhf_cli.commands.label import inputs as label_inputs
from rlhf_cli.commands.label.agreement import print_summary
from rlhf_cli.commands.label.at_terminal import label_at_terminal
from rlhf_cli.commands.label.candidates import CandidateFile, ordered_pairs, report_unusable
from rlhf_cli.commands.label.exchange import FORMATS, export_pairs, import_labels
from rlhf_cli.commands.label.inputs import LabelInputs, LabelOptions
from rlhf_cli.commands.label.judging import PairJudge, label_by_judge, load_judge
from rlhf_cli.commands.label.session import LabelSession, Pair, parse_annotators
from rlhf_cli.commands.label.store import LabelStore
from rlhf_cli.config.base import Options
from rlhf_cli.data.labels import LABELS, preference_pairs_of
from rlhf_cli.data.texts import prompt_key
from rlhf_cli.errors import RLHFError, install_hint, shell_path, shown
from rlhf_cli.files import make_folder
from rlhf_cli.jsonl import write_jsonl
from rlhf_cli.rewards.function import no_bytecode_files
from rlhf_cli.runs.layout import LABELS_FOLDER, MANIFEST
from rlhf_cli.runs.locks import lock_folder

POOL = 4  # times as many pairs are drawn as are labelled, if the uncertain ones among them come first
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def run(folder: Path, label_options: LabelOptions, options: Options) -> None:
    """Label until all pairs have a label, or the command is ended; every label is on disk by then.

    Raises RLHFError as `read_inputs` does, C15 if another process labels the same folder, D20 for a file that was
    edited by hand, E03 if a label cannot be written.
    """
    annotators = _annotators(label_options)
    _check_files(label_options)
    if label_options.export is not None and label_options.format is None:
        _export(folder, label_options)
        return

    with no_bytecode_files():
        inputs = label_inputs.read_inputs(folder, label_options, options)
        labels_folder = _labels_folder(inputs.run, label_options)
        judge = None
        if label_options.by is not None and label_options.export is None:
            judge = load_judge(label_options.by, inputs, label_options.n, options)
        make_folder(labels_folder)
        lock_folder(labels_folder, hint="open the page that it serves, or give another --name")
        label_inputs.keep_settings(labels_folder, inputs, label_options)
        candidates = _draw(labels_folder, inputs, label_options, options)
        pairs = ordered_pairs(candidates.candidates, label_options.order, label_options.n)
        if not pairs:
            raise RLHFError("D05", "no two answers differ: there is nothing to compare", hint="--answers 4 draws more")
        session = LabelSession(
            pairs,
            LabelStore(labels_folder),
            annotators,
            overlap=label_options.overlap,
            seed=label_options.seed,
        )
        _say_what_is_short(pairs, inputs, label_options.n)
        terminal.say(f"label    {len(pairs)} pairs in {shown(labels_folder)}: {session.done} of {session.total} labels")
        if label_options.export is not None and label_options.format is not None:
            num_pairs = export_pairs(session, label_options.export, label_options.format)
            _conclude_export(label_options.export, num_pairs)
            return
        _label(session, judge, label_options)
    print_summary(session.store.labels, [model.name for model in inputs.policies])
    count = f"{session.done} of {session.total}"
    if label_options.import_ is not None:  # of other annotators
        count = str(session.store_size)
    terminal.say(f"label    {count} labels in {shown(labels_folder / LABELS)}")
    following = _next_step(inputs.run, labels_folder.name, label_options) if session.store_size else None
    if following:
        terminal.say(f"next: {following}")
    values = {"folder": shown(labels_folder), "labels": session.store_size, "pairs": len(pairs), "next": following}
    terminal.conclude(shown(labels_folder), values)


def _say_what_is_short(pairs: Sequence[Pair], inputs: LabelInputs, wanted: int) -> None:
    """Say if there are fewer pairs than wanted, or some whose prompts were labelled before."""
    again = sum(prompt_key(pair.prompt) in inputs.labelled_before for pair in pairs)
    if again:
        count = f"{again} of {len(pairs)} pairs"
        terminal.say(f"label    {count} have prompts that a round before labelled: no others are left")
    if len(pairs) < wanted:
        terminal.say(f"label    {len(pairs)} pairs, not {wanted}: all prompts are answered; --answers 4 draws more")


def _next_step(run: Path, name: str, label_options: LabelOptions) -> str:
    """Return what the labels are for."""
    path = f"{LABELS_FOLDER}/{name}"
    if label_options.compare is None and (run / "ppo" / MANIFEST).is_file():
        return f"rlhf init next {shell_path(run)} {shell_path(run)}-2, a round that learns from them, too"
    if label_options.compare is None:
        return f"name them in {shown(run / 'reward.yaml')}, data: {{train: {path}}}, then rlhf run {shown(run)}"
    if label_options.by is not None:
        return f"labels of people: rlhf label {shown(run)} --compare {label_options.compare}"
    file = shown(run / "eval.yaml")
    return f"name them in {file}, judges: {{people: {{labels: {path}}}}}, then rlhf run {shown(run)}"


def _draw(folder: Path, inputs: LabelInputs, label_options: LabelOptions, options: Options) -> CandidateFile:
    """Return the candidates, with as many usable pairs as are needed, if there are prompts enough."""
    candidates = CandidateFile(folder, inputs.rows)
    needed = label_options.n * (POOL if label_options.scores else 1)
    if candidates.lacks(needed):
        sampler = label_inputs.load_sampler(inputs, label_options, options, folder)
        names = " and ".join(model.name for model in inputs.policies)
        answer = "answers" if len(inputs.policies) == 1 else "answer"
        terminal.say(f"label    {names} {answer} {len(inputs.rows)} prompts at most, {inputs.answers} answers each")
        try:
            candidates.extend(sampler, needed)
        finally:
            sampler.engines.close()
    report_unusable(candidates.candidates)
    return candidates


def _label(session: LabelSession, judge: PairJudge | None, label_options: LabelOptions) -> None:
    """Let whom the command line names label the pairs."""
    if label_options.import_ is not None and label_options.format is not None:
        import_labels(session, label_options.import_, label_options.format)
    elif judge is not None:
        label_by_judge(session, judge)
    elif label_options.terminal:
        with suppress(KeyboardInterrupt):  # as q: every label is on disk
            label_at_terminal(session)
    else:
        _serve(session, label_options.port)


def _check_files(label_options: LabelOptions) -> None:
    """Check --export, --import and --format. Raises RLHFError C07, C11, C15 before anything is drawn."""
    _require_format(label_options)
    export = label_options.export
    if label_options.import_ is not None and (export is not None or label_options.by is not None):
        text = "--import adds labels of another tool, and neither writes pairs nor asks a judge"
        raise RLHFError("C11", text, hint="omit --export and --by, or use them in another command")
    if export is not None and export.exists():
        raise RLHFError("C15", f"{shown(export)} exists already and is not overwritten", hint="name another file")


def _require_format(label_options: LabelOptions) -> None:
    """Raise RLHFError C07 for an unknown --format, C11 for --import without one."""
    form = label_options.format
    names = ", ".join(FORMATS)
    if form is not None and form not in FORMATS:
        raise RLHFError("C07", f"--format {form}: not one of {names}")
    if form is None and label_options.import_ is not None:
        raise RLHFError("C11", "--import needs the name of the tool that wrote the file", hint=f"--format {names}")
    if form is not None and label_options.import_ is None and label_options.export is None:
        raise RLHFError("C11", "--format is of a file", hint="name it: --export FILE or --import FILE")


def _serve(session: LabelSession, port: int) -> None:
    """Serve the page. Raises RLHFError E09 without the packages of the extra `label`."""
    try:
        from rlhf_cli.commands.label.server import serve
    except ModuleNotFoundError as error:
        hint = f"{install_hint('label')}, or label in the terminal: --terminal"
        raise RLHFError("E09", f"the page needs {error.name}", hint=hint) from error
    serve(session, port)


def _annotators(label_options: LabelOptions) -> list[str]:
    """Return the names of those who label. Raises RLHFError C11."""
    if label_options.by is None:
        return parse_annotators(label_options.annotators)
    if label_options.terminal:
        raise RLHFError("C11", "--by and --terminal: either a judge labels or people do", hint="omit one of them")
    return [label_options.by]


def _labels_folder(run: Path, label_options: LabelOptions) -> Path:
    """Return RUN/labels/NAME. Raises RLHFError S03 for a name that is no name of a folder."""
    name = label_options.folder_name
    if not NAME.fullmatch(name):
        raise RLHFError("S03", f"--name {name}: letters, digits, `-`, `_` and `.` only")
    return run / LABELS_FOLDER / name


def _export(folder: Path, label_options: LabelOptions) -> None:
    """Write the labelled pairs as rows {prompt, chosen, rejected}, and say how many.

    Raises RLHFError D01 without labels.
    """
    path = label_options.export
    assert path is not None
    labels_folder = _labels_folder(folder, label_options)
    if not (labels_folder / LABELS).is_file():
        raise RLHFError("D01", f"no labels in {shown(labels_folder)}", hint=f"rlhf label {shown(folder)} writes them")
    rows = [row for _, row in preference_pairs_of(labels_folder)]
    write_jsonl(path, rows)
    terminal.out(f"{shown(path)}: {len(rows)} pairs")
    _conclude_export(path, len(rows))


def _conclude_export(path: Path, num_pairs: int) -> None:
    terminal.conclude(shown(path), {"file": shown(path), "pairs": num_pairs})
