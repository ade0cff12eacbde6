"""Two generations at once in asyncio, and embeddings of one text and of several."""

import asyncio

from kqview import Engine


async def told(engine: Engine, prompt: str) -> list[str]:
    async with engine.generate(prompt, max_tokens=3, temperature=0, capture="probs") as generation:
        return [f"{token.text} {token.rows.shape[-1]}" async for token in generation]


async def main() -> None:
    with Engine.demo(n_ctx=256, n_slots=2, pooling="mean") as engine:
        for texts in await asyncio.gather(told(engine, "Anna is a"), told(engine, "Tom")):
            print(texts)
        vector = await engine.aembed("Anna")
        print(vector.shape)


asyncio.run(main())
