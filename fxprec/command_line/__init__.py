"""Run ``python -m fxprec``: what the library tells of a model, for those who do not want to write a script."""
