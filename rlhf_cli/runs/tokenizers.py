"""Whether two parents read text alike: by the same tokenizer, and the same chat template."""

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
    """Refuse two parents that do not read text alike.

    Stages of ours tell `tokenizer_sha256` and `template_sha256` in their manifests. For foreign parents the caller,
    who has loaded their tokenizers, gives them in `foreign` by parent key; one that nobody knows is not compared,
    nor is the template of a foreign parent that has none. The hash is of vocabulary, merges and special tokens alone:
    where it is the same, `difference` says what else makes other ids, or None.
    Raises T04 (other tokenizer) or T05 (other chat template), both hashes in the text.
    """
    told = foreign or {}
    left, right = (told.get(parent.key, parent.manifest) for parent in (a, b))
    first, second = left.get("tokenizer_sha256"), right.get("tokenizer_sha256")
    other = first and second and first != second
    spelled = None if other else difference(a, b)
    if other or spelled:
        hashes = f"({short_hash(second)} at {shown(b.path)}, {short_hash(first)} at {shown(a.path)})"
        alone = f"({shown(b.path)} beside {shown(a.path)}: {spelled})"
        raise RLHFError(
            "T04",
            f"{b.key} has another tokenizer than {a.key} {alone if spelled else hashes}",
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
            hint="set model.chat_template alike in both stages' files and run the later one again",
        )
