"""Tests; a package, so that another ``tests`` on the path cannot be taken for it."""
