"""The benchmark: Redline against itself, transformers, llama.cpp and flashspec, in one run."""
