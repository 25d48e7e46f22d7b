"""What a layer is (Problem) and how it is run: bound classes, tile variants, ring sizes."""

from .problem import Problem as Problem
