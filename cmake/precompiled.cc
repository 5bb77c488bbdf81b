// The program that heddle_precompile_headers compiles headers for; it is not run.
int main() {}
