"""Random programs that use a StatefulDataLoader, compared with a model: ``python -m stateful.model --help``."""
