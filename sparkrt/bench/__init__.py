"""Benchmarks for users: a load generator for servers, and the engine in process. Names and results are the field's."""
