"""From a planned graph to one C++ source file a program."""
