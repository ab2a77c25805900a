// Command lines as users of torchrun, DeepSpeed and accelerate write them.
#include "launcher/foreign_options.h"

#include "launcher/options.h"
#include "process/launcher/scratch.h"

#include <zeroth/base/error.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace zeroth::launcher {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

Options options_of(const std::vector<const char*>& arguments) {
  return parse_command_line(arguments).options.value();
}

std::string refusal(const std::vector<const char*>& arguments) {
  try {
    (void)parse_command_line(arguments);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUsage);
    return error.what();
  }
  return "not refused";
}

TEST(ForeignOptions, RanksOfThisHost) {
  for (const char* option : {"--nproc_per_node", "--nproc-per-node", "--num_gpus", "--num-gpus"}) {
    EXPECT_EQ(options_of({option, "3", "train.py"}).num_ranks, 3) << option;
    const std::string joined = std::string(option) + "=3";
    EXPECT_EQ(options_of({joined.c_str(), "train.py"}).num_ranks, 3) << option;
    for (const char* value : {"0", "-1", "4097", "2x", ""})
      EXPECT_THAT(refusal({option, value, "train.py"}), HasSubstr("1 to 4096")) << option << " " << value;
  }
  EXPECT_EQ(options_of({"--nnodes=1", "--nproc_per_node=2", "--node-rank", "0", "train.py"}).num_ranks, 2)
      << "one node needs no meeting point";
  const std::string elastic = refusal({"--nnodes", "2:4", "--node-rank", "0", "--rdzv", "h:1", "train.py"});
  EXPECT_THAT(elastic, HasSubstr("the number of nodes is fixed"));
  EXPECT_THAT(elastic, HasSubstr("got: '2:4'; hint: write --nnodes 2 or 4, and --max-restarts K"));
  EXPECT_THAT(refusal({"--nnodes=1:1", "train.py"}), HasSubstr("write --nnodes 1, and"));
  EXPECT_THAT(refusal({"-n", "2", "--num_gpus", "2", "true"}),
              HasSubstr("twice; which: -n, --num-gpus; hint: give one"));
}

TEST(ForeignOptions, RanksOfEachHost) {
  const Options options = options_of({"--hosts", "a:4,b:4", "--nproc_per_node", "2", "train.py"});
  EXPECT_EQ(options.num_ranks, 0);
  EXPECT_EQ(options.ranks_per_host, 2);
  EXPECT_THAT(refusal({"--hosts", "a:4,b:4", "--nproc_per_node", "auto", "train.py"}),
              HasSubstr("only their slots say how many ranks; which: --nproc-per-node; got: 'auto'"));
}

TEST(ForeignOptions, WordsForTheRanksOfThisHost) {
  EXPECT_EQ(ranks_of_word("gpu", {.cores = 4, .gpus = 8}).ranks, 8);
  EXPECT_EQ(ranks_of_word("cpu", {.cores = 4, .gpus = 8}).ranks, 4);
  EXPECT_EQ(ranks_of_word("auto", {.cores = 4, .gpus = 8}).note, "--nproc-per-node auto: 8 ranks, one for each GPU");
  EXPECT_EQ(ranks_of_word("auto", {.cores = 1, .gpus = 0}).note, "--nproc-per-node auto: 1 rank, one for each core");
  EXPECT_THROW((void)ranks_of_word("gpu", {.cores = 4, .gpus = 0}), Error);
  EXPECT_THROW((void)ranks_of_word("xpu", {.cores = 4, .gpus = 8}), Error);
  EXPECT_THAT(refusal({"--nproc_per_node", "tpu", "true"}),
              HasSubstr("which: --nproc-per-node; expected: 1 to 4096, or gpu, cpu or auto; got: 'tpu'"));
  EXPECT_THAT(refusal({"--num_gpus", "auto", "true"}), HasSubstr("--num-gpus")) << "DeepSpeed has no words";
  const Options by_core = options_of({"--nproc_per_node=cpu", "true"});
  EXPECT_GE(by_core.num_ranks, 1);
  EXPECT_THAT(by_core.ranks_note, HasSubstr("one for each core"));
}

TEST(ForeignOptions, GpusAreThoseThatRanksMaySee) {
  const test::Scratch scratch;
  for (const char* name : {"nvidia0", "nvidia1", "nvidia12", "nvidiactl", "nvidia-uvm", "nvidia", "other0"})
    scratch.file(name, "");
  EXPECT_EQ(count_gpus({}, scratch.path("")), 3);
  EXPECT_EQ(count_gpus({"CUDA_VISIBLE_DEVICES=1,GPU-x"}, scratch.path("")), 2);
  EXPECT_EQ(count_gpus({"CUDA_VISIBLE_DEVICES="}, scratch.path("")), 0);
  EXPECT_EQ(count_gpus({"CUDA_VISIBLE_DEVICES=-1"}, scratch.path("")), 0);
  EXPECT_EQ(count_gpus({}, "/no/folder"), 0);
}

TEST(ForeignOptions, AModuleTakesTheRest) {
  EXPECT_THAT(options_of({"-n", "2", "-m", "package.train", "-n", "5"}).command,
              ElementsAre("-m", "package.train", "-n", "5"));
  EXPECT_THAT(options_of({"--module", "--num_gpus=2", "train", "-m"}).command, ElementsAre("-m", "train", "-m"));
  EXPECT_THAT(refusal({"-n", "2", "-m"}), HasSubstr("no module to run was given"));
}

TEST(ForeignOptions, HintsNameOurs) {
  for (const auto& [option, hint] : std::vector<std::pair<const char*, const char*>>{
           {"--rdzv_endpoint", "write --rdzv HOST:PORT"},
           {"--rdzv-endpoint=h:1", "write --rdzv HOST:PORT"},
           {"--master_port", "write --rdzv HOST:PORT"},
           {"--master_addr", "write --rdzv HOST:PORT"},
           {"--rdzv_backend", "leave it out"},
           {"--rdzv_id", "leave it out"},
           {"--standalone", "leave it out"},
           {"--no_python", "only a program that ends in .py is run by Python"},
           {"--redirects", "write --log-dir DIR"},
           {"-H", "write --hostfile FILE"},
           {"--num_nodes", "--include or --exclude"},
           {"--num_processes", "write -n N"},
           {"--num_machines", "write --nnodes N"},
           {"--machine_rank", "write --node-rank K"},
           {"--main_process_port", "write --rdzv HOST:PORT"},
           {"--enable_each_rank_log", "write --log-dir DIR"},
           {"--bind_cores_to_rank", "write --bind-cores on"},
           {"--node_rank", "did you mean --node-rank?"},
           {"--max_restarts", "did you mean --max-restarts?"},
           {"--log_dir", "did you mean --log-dir?"},
       }) {
    const std::string text = refusal({"-n", "2", option, "1", "train.py"});
    const std::string name = std::string(option).substr(0, std::string(option).find('='));
    EXPECT_THAT(text, HasSubstr("unknown option; which: " + name + "; hint: ")) << option;
    EXPECT_THAT(text, HasSubstr(hint)) << option;
  }
  EXPECT_EQ(hint_for_foreign_option("--unheard-of"), "");
  EXPECT_THAT(refusal({"-n", "2", "--launcher", "openmpi", "true"}), HasSubstr("hint: write mpirun"));
  EXPECT_THAT(refusal({"-n", "2", "--launcher", "pdsh", "true"}), HasSubstr("hint: leave it out"));
}

}  // namespace
}  // namespace zeroth::launcher
