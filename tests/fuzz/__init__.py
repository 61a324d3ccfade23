"""Fuzz every parser whose input comes from outside: clients, peers, etcd, NATS and files.

`scripts/fuzz` searches for inputs that break a property of a target. The search is that of atheris
(libFuzzer), because it is guided by coverage: it mutates the inputs that reached new code, and so
gets behind checks that random inputs do not pass. The generated tests of hypothesis in `tests/unit`
have no such guide. The inputs that reached different code are in `corpus`, a file for each target.
`test_corpus.py` replays them without atheris.

    target: what a target is, and what several of them need
    registry: the names of all targets
    targets/: the targets, by the kind of parser
    mutations: changes of inputs that have a structure, such as JSON
    growth: the time and memory of a target in proportion to its input
    corpus_file: reads and writes a corpus
    fuzz_process: the process that fuzzes one target
    coverage_process: the process that measures the coverage of a corpus
    __main__: the command line; it starts these processes
"""
