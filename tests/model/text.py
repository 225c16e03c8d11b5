"""What the models are measured on."""

from __future__ import annotations

from pathlib import Path

WIKITEXT = Path(__file__).parents[2].parent / "shared" / "data" / "corpora" / "wikitext2-test.txt"

PROMPTS = (
    "Once upon a time", "The capital of France is", "def fibonacci(n):", "Water boils at",
    "Dear Sir or Madam,", "1, 1, 2, 3, 5, 8,", "In 1969, the first man", "A recipe for pancakes:",
    "The opposite of hot is", "To be, or not to be,", "SELECT name FROM", "The sun rises in the",
    "List three colours:", "E = m c", "My favourite book is", "It was a dark and stormy night",
    "The largest planet is", "Bonjour, je m'appelle", "for i in range(10):", "The meaning of life",
)  # fmt: skip

OWN = """\
Bread is older than writing. Long before anyone kept accounts, people ground wild grain between two stones,
wetted the meal and laid the paste on a hot rock beside the fire. What came off the rock was flat, hard at
the edges and soft in the middle, and it kept for days, which porridge does not. The step from that cake to
a loaf was a matter of forgetting. Dough that is left in a warm corner begins to move by itself: yeasts that
live on the grain and in the air eat its sugar and breathe out gas, and the gas is caught in a net of
gluten. A baker who came back a day late would have found a bowl of bubbles with a sour smell. Baked, it was
lighter than anything made before, and a piece of it kept raw could set the next bowl moving.

The same three things still decide how a loaf turns out: flour, water and time. Strong flour, with 12 or 13
% of protein, makes a net that holds; weak flour makes cake. More water opens the crumb, but a wet dough is
harder to shape, and most bakers stay between 60 and 75 parts of water to 100 of flour. Time can be bought
with yeast, at the price of taste: a dough with 2 % of fresh yeast is ready in an hour, one with a tenth of
that wants the night and is better for it. Salt, about two parts in a hundred, slows the yeast and tightens
the net; leave it out and the loaf spreads on the tray like a tired cat.

An oven for bread has to be hotter than most people dare. At 230 degrees the skin stays soft for the first
ten minutes only if there is steam, and it is in these minutes that the loaf rises for the last time;
without steam the crust sets early and tears where it is weakest. That is why a loaf is cut before it goes
in: the cut says where to tear. When the inside reaches 96 degrees the starch has set and nothing more will
happen but browning. Knock on the bottom. If it sounds hollow, take it out, put it on a rack and wait,
because the crumb is still drying, and a loaf cut while it is hot is gummy however well it was baked.
"Patience", my grandmother used to say, "is the only ingredient you cannot buy." She also said that nobody
ever followed this advice, herself included.
"""


def text() -> str:
    """The beginning of wikitext-2's test split where it is on this machine, else a text of our own."""
    return WIKITEXT.read_text("utf-8")[:20_000] if WIKITEXT.is_file() else OWN
