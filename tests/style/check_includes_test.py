#!/usr/bin/env python3
"""Shows that check_includes.py finds each offence that it looks for, and nothing in a clean tree."""

import pathlib
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True
import check_includes  # noqa: E402


class CheckIncludesTest(unittest.TestCase):
    def offences(self, path, text):
        """The offences of a tree with this one file, without the place."""
        with tempfile.TemporaryDirectory() as directory:
            root = pathlib.Path(directory)
            file = root / path
            file.parent.mkdir(parents=True)
            file.write_text(text)
            return check_includes.check_tree(root)

    def assert_clean(self, path, text):
        self.assertEqual(self.offences(path, text), [])

    def assert_found(self, path, text, why):
        found = self.offences(path, text)
        self.assertEqual(len(found), 1, found)
        self.assertIn(why, found[0])

    def test_the_layers_point_up(self):
        self.assert_clean("engine/a.cc", '#include "engine/a.h"\n#include "base/check.h"\n')
        self.assert_clean("kvstore/a.cc", '#include "storage/a.h"\n#include "ops/b.h"\n')
        self.assert_found("base/a.cc", '#include "engine/a.h"\n', "base/ may include only itself")
        self.assert_found("engine/a.cc", '#include "ops/sum.h"\n', "engine/ may include base")
        self.assert_found("ops/a.cc", '#include "engine/a.h"\n', "ops/ may include base")
        self.assert_found("storage/a.cc", '  #  include "kvstore/a.h"\n', "storage/ may include")
        self.assert_clean("c_api/a.cc", '#include "kvstore/a.h"\n')
        self.assert_found("kvstore/a.cc", '#include "c_api/a.h"\n', "kvstore/ may include")
        self.assert_found("engine/a.cc", '#include "tools/a.h"\n', "no folder of the library")

    def test_internal_headers_stay_in_their_folder(self):
        self.assert_clean("storage/a.cc", '#include "storage/internal/a.h"\n')
        self.assert_found("kvstore/a.cc", '#include "storage/internal/a.h"\n', "internal to storage/")

    def test_names_start_at_the_root(self):
        self.assert_found("engine/a.cc", '#include "../base/check.h"\n', "start at the root")
        self.assert_found("engine/a.cc", '#include "a.h"\n', "not named from the root")

    def test_brackets_tell_public_from_own(self):
        self.assert_clean("engine/a.cc", "#include <heddle/var.h>\n#include <fmt/format.h>\n")
        self.assert_found("engine/a.cc", '#include "heddle/var.h"\n', "included as <heddle/...>")
        self.assert_found("engine/a.cc", "#include <base/check.h>\n", "with quotes")

    def test_public_headers_stand_alone(self):
        start = "// What it is.\n#pragma once\n"
        self.assert_clean("include/heddle/a.h", start + "#include <heddle/b.h>\n#include <vector>\n")
        self.assert_clean("include/heddle/c_api.h", start + "#include <stdint.h>\n")
        self.assert_found("include/heddle/a.h", start + "#include <fmt/format.h>\n", "a public header")
        self.assert_found("include/heddle/a.h", start + "#include <unistd.h>\n", "a public header")
        self.assert_found("include/heddle/a.h", start + '#include "base/check.h"\n', "a public header")

    def test_headers_are_guarded(self):
        self.assert_found("base/a.h", "#include <vector>\n#pragma once\n", "#pragma once")
        self.assert_clean("ops/simd-inl.h", "#include <vector>\n")


if __name__ == "__main__":
    unittest.main()
