"""The course: lessons, exercises that grade themselves, and a museum of bugs. See __main__.py."""
