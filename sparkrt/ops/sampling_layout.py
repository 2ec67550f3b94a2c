"""Columns of the sampler's per-row parameters, and the layout of its token counts."""

from __future__ import annotations

PARAMS_F = 8  # float32 columns; those not named are 0
F_TEMPERATURE = 0  # 0: greedy
F_TOP_P = 1  # 1: off
F_MIN_P = 2  # 0: off
F_REPETITION = 3  # 1: off
F_PRESENCE = 4  # 0: off
F_FREQUENCY = 5  # 0: off

PARAMS_I = 8  # int32 columns; those not named are 0
I_TOP_K = 0  # 0 or less: off
I_SEED_LO = 1  # the 64-bit seed's low word, then its high word
I_SEED_HI = 2
I_STEP = 3  # tokens generated so far: with the seed, all that a draw depends on
I_MIN_TOKENS = 4  # the row's stop ids are banned while step is below it
I_ALLOWED_ROW = 5  # row of allowed_bits, or -1: everything is allowed

PROMPT_BIT = 1 << 30  # of a count: the token is in the prompt; the bits below say how often it was generated
