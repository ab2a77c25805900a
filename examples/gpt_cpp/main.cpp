// zeroth-gpt: trains a byte-level GPT on the text of a folder, with ZeRO 0-3 over the ranks that were
// started.
//
//   build/bin/zeroth-run -n 2 build/bin/zeroth-gpt --data /usr/lib/python3 --suffix .py --steps 100 --sample
//   300
//
// prints the size and digest of the text, a progress line every ten steps, the validation loss beside the
// byte-bigram entropy of the held-out text, a text sample, and what memory and traffic were planned and
// measured. A single bare process works too. The last loss is the same number, bit for bit, with --zero-stage
// 0, 1, 2 and 3. With --mesh dp=2,tp=2 four ranks are two pairs, each of which has one batch and shares the
// matrices of every layer; with --mesh dp=2,sp=2 each pair shares its sequences; with --mesh dp=2,pp=2 each pair is a
// pipeline, whose stages have half of the layers each and work on the --accumulate micro-batches of a step at the same
// time.
#include "options.h"
#include "trainer.h"

#include <zeroth/base/preemption.h>
#include <zeroth/engine/run.h>

#include <cstdlib>
#include <iostream>

int main(int argc, char** argv) {
  return zeroth::run([&](const zeroth::World& world) {
    const gpt::CommandLine line = gpt::parse_command_line(argc, argv);
    if (line.help) {
      if (world.rank() == 0) {
        std::cout << *line.help << std::flush;
      }
      return EXIT_SUCCESS;
    }
    return gpt::train(line.options, world) ? zeroth::kExitPreempted : EXIT_SUCCESS;
  });
}
