"""An LLM decode engine on a lease: many tenants, one pass per step, and the same tokens as without other tenants.

    async with Decoder.open(TINY_MODEL) as decoder:
        async for piece in decoder.generate("The with statement", max_tokens=32):
            print(piece, end="", flush=True)

`Decoder` serves prompts. For servers with their own loop, `DecodeEngine` computes steps and `ContinuousBatchScheduler`
plans them. Importing these names needs only the client. Opening a model's files needs the extra `decode`; without it,
the error says so.
"""

import gpulease.client.imported_on_access as _imported_on_access

__getattr__ = _imported_on_access.imported_on_access(globals(), "gpulease.client.decode.supervisor.public")


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
