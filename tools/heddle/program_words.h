// The program that `heddle launch` and `heddle run` are given, with its arguments.
#pragma once

#include <string>
#include <vector>

namespace heddle::tools {

// Takes the words behind the first "--" out of a command line of these commands, for CLI11 would
// take "[1,2]" apart there too. It gets one word for all of them. Nothing if there are none.
std::vector<std::string> TakeProgram(std::vector<const char*>& line);

// `parsed`: what CLI11 has found, from the first word of the program on; `taken`: by TakeProgram.
std::vector<std::string> WholeProgram(std::vector<std::string> parsed,
                                      const std::vector<std::string>& taken);

}  // namespace heddle::tools
