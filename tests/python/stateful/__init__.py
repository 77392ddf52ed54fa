"""Tests of StatefulDataLoader."""
