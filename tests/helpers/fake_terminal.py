"""A terminal for the tests of what is printed on one."""

import io


class Tty(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True
