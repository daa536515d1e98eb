"""Compatibility of two parents: the same tokenizer and chat template."""

from collections.abc import Callable, Mapping

from rlhf_cli.errors import RLHFError, shown
from rlhf_cli.runs.parents import FOREIGN, Parent, short_hash


def check_same_tokenizer(
    a: Parent,
    b: Parent,
    *,
    where: str,
    foreign: Mapping[str, Mapping[str, str | None]] | None = None,
    difference: Callable[[Parent, Parent], str | None] = lambda *_: None,
) -> None:
    """Raise T04 if two parents have different tokenizers, T05 for different chat templates, with both hashes.

    Our stages record `tokenizer_sha256` and `template_sha256` in their manifests; for foreign parents the caller passes
    them in `foreign`, by parent key. Unknown tokenizers are not compared, nor is the template of a foreign parent
    without one. The hash covers vocabulary, merges and special tokens; if it is equal, `difference` returns any other
    difference that changes the token ids, or None.
    """
    known = foreign or {}
    left, right = (known.get(parent.key, parent.manifest) for parent in (a, b))
    first, second = left.get("tokenizer_sha256"), right.get("tokenizer_sha256")
    hash_differs = first and second and first != second
    reason = None if hash_differs else difference(a, b)
    if hash_differs or reason:
        hashes = f"({short_hash(second)} at {shown(b.path)}, {short_hash(first)} at {shown(a.path)})"
        details = f"({shown(b.path)} beside {shown(a.path)}: {reason})"
        raise RLHFError(
            "T04",
            f"{b.key} has another tokenizer than {a.key} {details if reason else hashes}",
            where=where,
            hint=f"train the model of {b.key} from the checkpoint of {a.key}"
            + ("; or set models.value: policy_head" if b.key == "models.value" else "")
            + ("; or set models.value: policy_head, or a PATH, not to copy it" if b.key == "models.reward" else ""),
        )
    both_known = all("template_sha256" in side for side in (left, right))
    first, second = left.get("template_sha256"), right.get("template_sha256")
    foreign_without = any(parent.stage == FOREIGN and not sha for parent, sha in ((a, first), (b, second)))
    if both_known and first != second and not foreign_without:
        raise RLHFError(
            "T05",
            f"{b.key} has another chat template than {a.key} ({short_hash(second)} at {shown(b.path)}, "
            f"{short_hash(first)} at {shown(a.path)})",
            where=where,
            hint="set the same model.chat_template in both stages' files and run the later stage again",
        )
