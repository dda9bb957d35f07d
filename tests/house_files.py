"""The package's files, measured once: three test files ask for them where they are collected."""

from nanoserve.tools.house import read_house

FILES = read_house()
