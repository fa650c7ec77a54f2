"""Awkward texts, on which two tokenizers, or two versions of one, are likely to differ."""

from __future__ import annotations

PROBES = (
    "",
    "a" * 300,
    "ab" * 600,
    "=" * 1000,
    " " * 70,
    " " * 1200 + "x",
    "\n" * 70,
    "x\n" + " \n" * 400 + "  y",
    "\t \n \r\n \r x",
    "\r\r\n\n\r \u00a0\u2003 \x0b\x0c\x1c\x1d\x1e\x1f\x85 x",
    "no\u00a0break, line\u2028separator\u2029, next\u0085line, nul\x00, bom\ufeff",
    "zero\u200bwidth\u200c\u200d\u2060 soft\u00adhyphen \u180e \u3000ideographic\u1680ogham",
    "👩\u200d👩\u200d👧\u200d👦 🇻🇳 ✊🏿 1\ufe0f\u20e3 ❤\ufe0f",
    "e\u0301 a\u0323\u0306 o\u031b\u0301 \u1ec7 ﬁ ½ Å \u212b \u2126 \u0344 \u0958",
    "a\u0301\u0316\u0323\u0301 \u0301start \u1100\u1161\u11a8 \uac00\u11a8 \u0f73\u0f71",
    # Compositions that came with Unicode 15 and 16: two versions may know different ones.
    "\U000105d2\u0307 \U00011382\U000113c9 \U0001611e\U0001611e \U00016d67\U00016d67",
    # Letters, marks, digits and signs of Unicode 13 to 17.
    "\u0870\u0898\u1b4c\u2c2f\ua7cb\ua7da\ua7f1\U00010ec2\U00011240\U00011f50\U0001e4d0\U00031350",
    "\U0001e5f0\U0001ccf0\U0001ccf9\U00010d40\U00016d71\U00011bf1\U0002ebf0\U00032000\U0001fae9",
    "Tiếng Việt, 中文維基百科, العربية, हिन्दी, Ελληνικά, русский, 한국어, ไทย",
    "မြန်မာ ខ្មែរ བོད་ཡིག தமிழ் עברית ქართული አማርኛ ᏣᎳᎩ ꦗꦮ 𐎠𐎡 𝒳𝔸 ǅ ʰ ªº",
    "1234567890 ١٢٣ १२३ Ⅻ 3.14159 1,000,000 ²³ ①② 𝟘𝟙 ৴ 0x1F 1e-9",
    "I'll've DON'T 'S 'Re it's we'd 're 'ſ 'K d’s D'LL'M x'\u0301s ''s",
    "<|endoftext|><|im_start|>user</s><s>[INST] <unk> <pad> <tool_call></think>",
    "def f(x):\n    return {'a': [x, *y]}  # why?\n\n\n\tif  a==b :\n\t\t pass\n",
    "http://example.org/a_b-c?d=%20&e#f  A.B.C.  …—–‑ «»‹›„“ $€₫ ©®™ ±×÷ ^`¨ _‿",
    "\U0001f600\U00020000\u0378\ue000\ufffd\uffff\U0010ffff\x00\x01\x7f\x80",
    "camelCaseWords HTTPServer iPhone XMLHttpRequest.newInstance() ALLCAPS MiXeD",
)


def long_runs(characters: int) -> list[str]:
    """Return texts of one repeated character, which may overflow a regular expression's stack."""
    return [run * (characters - 1) + "x" for run in (" ", "\n", "中")]
