from kqview import Engine

engine = Engine.demo()  # the bundled demo model; Engine("model.gguf") opens yours
prompt = "Mirelda found a silver key near the old bridge. Then Mirel"
# "probs": attention after the softmax, the share that a token gives to each earlier one
for token in engine.generate(prompt, max_tokens=2, temperature=0, capture="probs"):
    rows = token.rows  # one row per layer and head
    print(rows.shape, rows.dtype, "writeable:", rows.flags.writeable, "owner:", rows.flags.owndata)
    weights = rows[1, 0]  # layer 1, head 0: one weight per earlier token
    most = 1 + weights[1:].argmax()  # skip token 0: idle heads put their weight there
    print(f"sum {weights.sum():.3f}, most at {token.column_texts[most]!r}")
