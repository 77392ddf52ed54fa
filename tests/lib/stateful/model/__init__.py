"""Random programs of a StatefulDataLoader, compared with a list of batches; ``python -m stateful.model --help``."""
