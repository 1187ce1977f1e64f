"""How an image is refused: always with the line, its text and the reason."""

from gpulease.daemon.drivers.interface import ImageRejected


def rejected(reason: str, *, line: int = 0, text: str = "", kernel: str = "", hint: str = "") -> ImageRejected:
    """The error for one offending line; `text` is that line's source, `kernel` the function it lies in."""
    shown = " ".join(text.split())[:200]
    place = f" of kernel {kernel}" if kernel else ""
    where = f"line {line}{place}: " if line else ""
    log = f"{where}{reason}" + (f"\n    {shown}" if shown else "")
    message = f"{where}{reason}" + (f": {shown}" if shown else "")
    return ImageRejected(message, log=log, line=line, hint=hint)
