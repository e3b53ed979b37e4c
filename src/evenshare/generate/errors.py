"""Errors a user can cause or cure; the command line prints them without a traceback."""

from __future__ import annotations


class GenerateError(Exception):
    """Base of the errors below. `exit_code` is what the command line returns."""

    exit_code = 2


class ModelFileError(GenerateError):
    """The model's file or folder is missing, damaged, or holds something that is not supported."""


class FetchError(GenerateError):
    """The default model could not be fetched."""

    exit_code = 1


class MissingExtraError(GenerateError):
    """A package of an optional extra is not installed."""

    exit_code = 1
