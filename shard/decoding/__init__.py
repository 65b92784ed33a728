"""Decoding strategies, one a file: sampling, speculative decoding, beam search; with sampling, grammars, drafting and
verification."""
