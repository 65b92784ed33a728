"""Cost limits of grammars, in llguidance's terms: the router refuses larger ones, so that the shards never get them."""

import llguidance

MOST_SYMBOLS = 16_384  # of a grammar; an object with 2000 properties has about as many and compiles in 0.3 s (x86, one core)
MOST_LEXER_STATES = 50_000  # of 1 to 2 kB each
STEP_LEXER_FUEL = 100_000  # 14,000 of it take 1 ms
STEP_ITEMS = 50_000  # 20,000 of them take 1 ms
ROW_ITEMS = 10_000  # four for each property of an object that may or may not be there


def limits() -> llguidance.LLParserLimits:
    """The limits for every matcher on either side."""
    return llguidance.LLParserLimits(
        step_lexer_fuel=STEP_LEXER_FUEL,
        step_max_items=STEP_ITEMS,
        max_items_in_row=ROW_ITEMS,
        max_lexer_states=MOST_LEXER_STATES,
        max_grammar_size=MOST_SYMBOLS,
        verbose_errors=False,
    )
