"""Spans of time in words, for every line and page."""

MINUTE, HOUR, DAY = 60, 3600, 86400


def duration(seconds: float) -> str:
    """`under 1 ms`, `0.012 s`, `4.7 s`, `42 s`, `12 min 3 s`, `2 d 5 h`: two units at most, none that is 0."""
    if 0 < seconds < 0.001:
        return "under 1 ms"
    if seconds < 9.95:
        return f"{seconds:.2g} s"
    whole = round(seconds)
    for large, unit, small, rest in ((DAY, "d", HOUR, "h"), (HOUR, "h", MINUTE, "min"), (MINUTE, "min", 1, "s")):
        if whole >= large:
            left = whole % large // small
            return f"{whole // large} {unit}" + (f" {left} {rest}" if left else "")
    return f"{whole} s"


def ago(seconds: float) -> str:
    """`just now`, `12 min ago`, `3 h ago`, `2 d ago`; a time to come, of a clock that is ahead, is now."""
    for size, unit in ((DAY, "d"), (HOUR, "h"), (MINUTE, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit} ago"
    return "just now"
