extern "C" __attribute__((visibility("default"))) int kvr_version() { return 1; }
